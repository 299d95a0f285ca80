"""Runs the Triton kernels in Triton's interpreter, on CPU tensors.

Triton reads the variable when it is imported, which nothing else in the suite does.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from tests.unit.engine.gpu.interpreter_bfloat16 import support_bfloat16

support_bfloat16()
