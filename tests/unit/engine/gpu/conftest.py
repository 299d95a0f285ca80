"""Runs the Triton kernels in Triton's interpreter, on CPU tensors.

Triton reads the variable when it is imported, as transformers does: this folder is collected before
the tests beside it that import that.
"""

from __future__ import annotations

import os
import sys

assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", (
    "a test collected before this folder has imported Triton, so its interpreter can't be chosen"
)
os.environ["TRITON_INTERPRET"] = "1"

from tests.unit.engine.gpu.interpreter_bfloat16 import support_bfloat16  # noqa: E402

support_bfloat16()
