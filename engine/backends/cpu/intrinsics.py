"""Scalar building blocks that numba lacks, written so that LLVM vectorises loops over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.backends.cpu.vector_ir import (
    F32,
    I8,
    I32,
    I64,
    LANES,
    V16F16,
    V16F32,
    V16I32,
    call,
    constant,
    exp,
    fma,
    fold,
    larger,
    load,
    splat,
)

inner = numba.njit(
    nogil=True,
    boundscheck=False,
    error_model="numpy",  # Python's check for division by zero keeps loops from vectorising
)
"""Decorates the parts that kernels inline; they are cached in the kernels alone.

Without fast-math: what LLVM may reorder or fuse, it reorders and fuses differently at each level,
and in code that it optimises once or twice (freshly compiled or from the cache).
"""


@intrinsic
def _as_pointer(typingctx: Any, address: Any, kind: Any) -> Any:
    """A pointer to an address; ``kind`` is a dtype."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind.dtype)(types.int64, kind), codegen


@inner
def matrix(address: Any, rows: Any, columns: Any) -> Any:
    """The contiguous float32 array [rows, columns] at an address.

    Kernels that are called hundreds of times a step take addresses: turning one tensor into an
    array costs as much as normalising a row.
    """
    return numba.carray(_as_pointer(address, np.float32), (rows, columns))


@inner
def codes_at(address: Any, kind: Any, rows: Any, columns: Any) -> Any:
    """As ``matrix``, for quantised activations of dtype ``kind``."""
    return numba.carray(_as_pointer(address, kind), (rows, columns))


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


@intrinsic
def exp_f32(typingctx: Any, x: Any) -> Any:
    """See ``vector_ir.exp``; without branches, so that loops over it vectorise."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return exp(builder, args[0])

    return types.float32(types.float32), codegen


@intrinsic
def sum_of_squares(typingctx: Any, values: Any) -> Any:
    """Σ x² of a contiguous float32 array, in one order at every level."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _reduce(
            context, builder, values, args[0],
            turn=lambda total, x: fma(builder, x, x, total), combine=builder.fadd,
        )  # fmt: skip

    return types.float32(values), codegen


@intrinsic
def largest_magnitude(typingctx: Any, values: Any) -> Any:
    """max |x| of a contiguous float32 array."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def magnitude(x: Any) -> Any:
            suffix = "v16f32" if isinstance(x.type, ir.VectorType) else "f32"
            return call(builder, f"llvm.fabs.{suffix}", x.type, x)

        return _reduce(
            context, builder, values, args[0],
            turn=lambda most, x: larger(builder, magnitude(x), most),
            combine=lambda left, right: larger(builder, left, right),
        )  # fmt: skip

    return types.float32(values), codegen


def _reduce(
    context: Any, builder: Any, kind: Any, array: Any, *, turn: Callable[[Any, Any], Any],
    combine: Callable[[Any, Any], Any],
) -> Any:  # fmt: skip
    """16 running results from 0, folded in one order, then the elements that are left over.

    ``turn(result, element)`` and ``combine(result, result)`` are called with vectors and scalars.
    """
    struct = context.make_array(kind)(context, builder, array)
    (size,) = cgutils.unpack_tuple(builder, struct.shape, 1)
    start = builder.ptrtoint(struct.data, I64)

    def over(count: Any, first: Any, initial: Any, stride: int) -> Any:
        result = cgutils.alloca_once_value(builder, initial)
        with cgutils.for_range(builder, count) as loop:
            at = builder.add(first, builder.mul(loop.index, ir.Constant(I64, stride)))
            element = load(builder, at, initial.type, 4)
            builder.store(turn(builder.load(result), element), result)
        return builder.load(result)

    lanes, four = ir.Constant(I64, LANES), ir.Constant(I64, 4)
    num_vectors = builder.sdiv(size, lanes)
    whole = over(num_vectors, start, constant(V16F32, 0.0), 4 * LANES)
    done = builder.mul(num_vectors, lanes)
    rest = builder.add(start, builder.mul(done, four))
    return over(builder.sub(size, done), rest, fold(builder, whole, combine), 4)


@intrinsic
def softmax_row(typingctx: Any, scores: Any, low: Any, high: Any, largest: Any) -> Any:
    """Turn a row of scores into weights relative to its largest score so far.

    Keys outside ``low`` < ``high`` may hold anything, NaN included; their weight is 0. Takes a
    contiguous row whose size is a multiple of 16, and the largest score before. Returns (the
    largest score now, the sum of the weights).
    """
    kind = types.UniTuple(types.float32, 2)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        struct = context.make_array(scores)(context, builder, args[0])
        (size,) = cgutils.unpack_tuple(builder, struct.shape, 1)
        start = builder.ptrtoint(struct.data, I64)

        def clear(at: Any, count: Any) -> None:
            number = builder.mul(count, ir.Constant(I64, 4))
            cgutils.memset(builder, builder.inttoptr(at, I8.as_pointer()), number, 0)

        indices = ir.VectorType(I64, LANES)
        first, last = (splat(builder, bound, indices) for bound in args[1:3])
        every = ir.Constant(indices, list(range(LANES)))
        lanes = ir.Constant(I64, LANES)
        begin = builder.mul(builder.sdiv(args[1], lanes), lanes)
        above = builder.add(args[2], ir.Constant(I64, LANES - 1))
        end = builder.mul(builder.sdiv(above, lanes), lanes)
        clear(start, begin)
        clear(builder.add(start, builder.mul(end, ir.Constant(I64, 4))), builder.sub(size, end))

        def each_vector(step: Callable[[Any, Any, Any], None]) -> None:
            """Call ``step(address, scores, which of them are inside)``."""
            with cgutils.for_range_slice(builder, begin, end, lanes, I64, inc=True) as (base, _):
                index = builder.add(splat(builder, base, indices), every)
                inside = builder.and_(
                    builder.icmp_signed(">=", index, first), builder.icmp_signed("<", index, last)
                )
                at = builder.add(start, builder.mul(base, ir.Constant(I64, 4)))
                step(at, load(builder, at, V16F32, 4), inside)

        top = cgutils.alloca_once_value(builder, splat(builder, args[3], V16F32))
        total = cgutils.alloca_once_value(builder, constant(V16F32, 0.0))

        def find_largest(at: Any, values: Any, inside: Any) -> None:
            before = builder.load(top)
            builder.store(larger(builder, builder.select(inside, values, before), before), top)

        each_vector(find_largest)
        now = fold(builder, builder.load(top), lambda left, right: larger(builder, left, right))
        reference = splat(builder, now, V16F32)

        def weigh(at: Any, values: Any, inside: Any) -> None:
            below = builder.select(inside, builder.fsub(values, reference), constant(V16F32, 0.0))
            weights = builder.select(inside, exp(builder, below), constant(V16F32, 0.0))
            builder.store(weights, builder.inttoptr(at, V16F32.as_pointer()), align=4)
            builder.store(builder.fadd(builder.load(total), weights), total)

        each_vector(weigh)
        summed = fold(builder, builder.load(total), builder.fadd)
        return context.make_tuple(builder, kind, (now, summed))

    return kind(scores, types.intp, types.intp, types.float32), codegen


@intrinsic
def prefetch(typingctx: Any, block: Any, size: Any) -> Any:
    """Begin to read ``size`` elements of a contiguous array into the caches."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(block)(context, builder, args[0]).data
        start = builder.ptrtoint(data, I64)
        num_bytes = builder.mul(args[1], ir.Constant(I64, block.dtype.bitwidth // 8))
        line = ir.Constant(I64, 64)
        read, most_local, data_cache = (ir.Constant(I32, value) for value in (0, 3, 1))
        with cgutils.for_range_slice(
            builder, ir.Constant(I64, 0), num_bytes, line, I64, inc=True
        ) as (offset, _):
            at = builder.inttoptr(builder.add(start, offset), I8.as_pointer())
            call(builder, "llvm.prefetch.p0", ir.VoidType(), at, read, most_local, data_cache)
        return context.get_dummy_value()

    return types.void(block, types.intp), codegen
