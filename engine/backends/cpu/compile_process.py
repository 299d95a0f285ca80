"""Compiles a part of the kernels into the cache; see ``kernel_compiler``, which starts it.

``python -m engine.backends.cpu.compile_process PART WEIGHTS KV_DTYPE`` writes one line when it
begins a kernel: ``PART NAME``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from engine.backend import KVDtype
from engine.backends.cpu.backend import WeightScheme
from engine.backends.cpu.kernel_calls import Part, kernel_calls, run_everywhere


def main(arguments: Sequence[str]) -> None:
    """Compile until all is done."""
    part = msgspec.convert(arguments[0], Part)
    weights = msgspec.convert(arguments[1], WeightScheme)
    kv_dtype = msgspec.convert(arguments[2], KVDtype)
    for call in kernel_calls(part):
        print(part, call.name, flush=True)
        run_everywhere(call, weights, kv_dtype)


if __name__ == "__main__":
    main(sys.argv[1:])
