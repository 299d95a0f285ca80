"""Scalar building blocks that numba lacks, written so that LLVM vectorises loops over them."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.backends.cpu.vector_ir import F32, I64, LANES, V16F16, V16F32, V16I32, load

inner = numba.njit(
    nogil=True,
    cache=True,
    fastmath=True,
    boundscheck=False,
    error_model="numpy",  # Python's check for division by zero keeps loops from vectorising
)
"""Decorates the parts that kernels inline."""


@intrinsic
def int32_as_float32(typingctx: Any, value: Any) -> Any:
    """Reinterpret the bits of an int32 as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


def widen(builder: Any, address: Any, kind: Any) -> Any:
    """16 stored KV elements at an int64 address, as float32; the array's dtype tells the format.

    float32 as is; uint16 holds bfloat16 bits, int16 holds float16 bits, int8 an integer.
    """
    element = F32 if kind == types.float32 else ir.IntType(kind.bitwidth)
    stored = load(builder, address, ir.VectorType(element, LANES), kind.bitwidth // 8)
    if kind == types.uint16:
        shift = ir.Constant(V16I32, [16] * LANES)
        return builder.bitcast(builder.shl(builder.zext(stored, V16I32), shift), V16F32)
    if kind == types.int16:
        return builder.fpext(builder.bitcast(stored, V16F16), V16F32)
    if kind == types.int8:
        return builder.sitofp(stored, V16F32)
    return stored


@intrinsic
def copy_as_float32(typingctx: Any, source: Any, size: Any, target: Any) -> Any:
    """Copy a contiguous array of stored KV elements to an address; ``size`` a multiple of 16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array_value, number, to = args
        data = context.make_array(source)(context, builder, array_value).data
        start = builder.ptrtoint(data, I64)
        vectors = builder.sdiv(number, ir.Constant(I64, LANES))
        with cgutils.for_range(builder, vectors) as loop:
            step = ir.Constant(I64, LANES * source.dtype.bitwidth // 8)
            value = widen(builder, builder.add(start, builder.mul(loop.index, step)), source.dtype)
            at = builder.add(to, builder.mul(loop.index, ir.Constant(I64, 4 * LANES)))
            builder.store(value, builder.inttoptr(at, V16F32.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(source, types.intp, types.int64), codegen


@intrinsic
def store_float32(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """``array[index] = value`` for a 1-D KV row in any of ``widen``'s formats.

    bfloat16 rounds to nearest even; float16 saturates at ±65504; int8 expects an integral value.
    """
    kind = array.dtype

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array_value, position, number = args
        i16, i32 = ir.IntType(16), ir.IntType(32)
        if kind == types.uint16:
            bits = builder.bitcast(number, i32)
            odd = builder.and_(builder.lshr(bits, ir.Constant(i32, 16)), ir.Constant(i32, 1))
            rounded = builder.add(builder.add(bits, ir.Constant(i32, 0x7FFF)), odd)
            number = builder.trunc(builder.lshr(rounded, ir.Constant(i32, 16)), i16)
        elif kind == types.int16:
            for limit, above in ((65504.0, ">"), (-65504.0, "<")):
                bound = ir.Constant(ir.FloatType(), limit)
                beyond = builder.fcmp_ordered(above, number, bound)
                number = builder.select(beyond, bound, number)
            number = builder.bitcast(builder.fptrunc(number, ir.HalfType()), i16)
        elif kind == types.int8:
            number = builder.fptosi(number, ir.IntType(8))
        struct = context.make_array(array)(context, builder, array_value)
        (stride,) = cgutils.unpack_tuple(builder, struct.strides, 1)
        address = builder.add(
            builder.ptrtoint(struct.data, stride.type), builder.mul(position, stride)
        )
        builder.store(number, builder.inttoptr(address, struct.data.type))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), codegen


_LOG2E = np.float32(1.4426950408889634)
_LN2_HI = np.float32(0.693359375)
_LN2_LO = np.float32(-2.12194440e-4)
_LIMIT = np.float32(87.0)
_P0 = np.float32(1.9875691500e-4)
_P1 = np.float32(1.3981999507e-3)
_P2 = np.float32(8.3334519073e-3)
_P3 = np.float32(4.1665795894e-2)
_P4 = np.float32(1.6666665459e-1)
_P5 = np.float32(5.0000001201e-1)
_ONE = np.float32(1.0)
_HALF = np.float32(0.5)


@numba.njit(inline="always", fastmath={"contract", "arcp", "nsz"})
def exp_f32(x: float) -> float:
    """e^x, relative error below 2e-7 (Cephes ``expf``), without branches; x is held in ±87."""
    x = min(max(np.float32(x), -_LIMIT), _LIMIT)
    n = np.floor(x * _LOG2E + _HALF)
    r = x - n * _LN2_HI - n * _LN2_LO
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    p = p * r * r + r + _ONE
    return p * int32_as_float32(np.int32((np.int32(n) + np.int32(127)) << 23))
