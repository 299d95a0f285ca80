"""Scalar building blocks that numba lacks, written so that LLVM vectorises loops over them."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def int32_as_float32(typingctx: Any, value: Any) -> Any:
    """Reinterpret the bits of an int32 as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


_LOG2E = 1.4426950408889634
_LN2_HI = 0.693359375
_LN2_LO = -2.12194440e-4


@numba.njit(inline="always", fastmath={"contract", "arcp", "nsz"})
def exp_f32(x: float) -> float:
    """e^x for x ≤ 0, relative error below 2e-7 (Cephes ``expf``); saturates at e^-87."""
    x = max(numba.float32(x), numba.float32(-87.0))
    n = numba.float32(numba.int32(x * numba.float32(_LOG2E) - numba.float32(0.5)))
    r = x - n * numba.float32(_LN2_HI)
    r = r - n * numba.float32(_LN2_LO)
    p = numba.float32(1.9875691500e-4)
    p = p * r + numba.float32(1.3981999507e-3)
    p = p * r + numba.float32(8.3334519073e-3)
    p = p * r + numba.float32(4.1665795894e-2)
    p = p * r + numba.float32(1.6666665459e-1)
    p = p * r + numba.float32(5.0000001201e-1)
    p = p * r * r + r + numba.float32(1.0)
    return p * int32_as_float32(numba.int32((numba.int32(n) + numba.int32(127)) << 23))
