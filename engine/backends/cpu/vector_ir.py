"""Pieces of LLVM vector IR that the hand-written kernels share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

LANES = 16
"""Elements per vector: one AVX-512 register, two AVX2 or four NEON ones."""

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
V16I32 = ir.VectorType(I32, LANES)
V16F32 = ir.VectorType(F32, LANES)
V16F16 = ir.VectorType(ir.HalfType(), LANES)


def load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    """A value of type ``kind`` at an int64 address."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def splat(builder: Any, scalar: Any, vector_type: ir.VectorType) -> Any:
    """The scalar in every lane."""
    undefined = ir.Constant(vector_type, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    mask = ir.Constant(ir.VectorType(I32, vector_type.count), [0] * vector_type.count)
    return builder.shuffle_vector(one, undefined, mask)


def constant(kind: ir.VectorType, value: float) -> Any:
    """The number in every lane."""
    return ir.Constant(kind, [value] * kind.count)


def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call an LLVM intrinsic."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def fma(builder: Any, left: Any, right: Any, total: Any) -> Any:
    """left * right + total, rounded once, on float32 or vectors of it."""
    return call(builder, f"llvm.fma.{_suffix(total.type)}", total.type, left, right, total)


def _suffix(kind: Any) -> str:
    return f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"


_EXP_LIMIT = 87.0
_LOG2E = 1.4426950408889634
_MINUS_LN2_HIGH = -0.693359375
_MINUS_LN2_LOW = 2.12194440e-4
_EXP_POLYNOMIAL = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
    5.0000001201e-1,
)  # fmt: skip


def exp(builder: Any, x: Any) -> Any:
    """e^x of float32 or vectors of it, relative error below 2e-7 (Cephes ``expf``); x in ±87."""
    kind = x.type
    ints = ir.VectorType(I32, kind.count) if isinstance(kind, ir.VectorType) else I32

    def number(value: float, of: Any = kind) -> Any:
        rounded = value if of is ints else float(np.float32(value))
        return constant(of, rounded) if isinstance(of, ir.VectorType) else ir.Constant(of, rounded)

    x = larger(builder, x, number(-_EXP_LIMIT))
    limit = number(_EXP_LIMIT)
    x = builder.select(builder.fcmp_ordered("<", x, limit), x, limit)
    n = call(
        builder, f"llvm.floor.{_suffix(kind)}", kind, fma(builder, x, number(_LOG2E), number(0.5))
    )
    r = fma(builder, n, number(_MINUS_LN2_HIGH), x)
    r = fma(builder, n, number(_MINUS_LN2_LOW), r)
    p = number(_EXP_POLYNOMIAL[0])
    for coefficient in _EXP_POLYNOMIAL[1:]:
        p = fma(builder, p, r, number(coefficient))
    p = builder.fadd(fma(builder, builder.fmul(p, r), r, r), number(1.0))
    exponent = builder.add(builder.fptosi(n, ints), number(127, ints))
    return builder.fmul(p, builder.bitcast(builder.shl(exponent, number(23, ints)), kind))


def fold(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """A vector's lanes as one scalar: the upper half onto the lower, until one is left."""
    count = vector.type.count
    while count > 1:
        count //= 2
        half = ir.VectorType(I32, count)
        undefined = ir.Constant(vector.type, ir.Undefined)
        low = builder.shuffle_vector(vector, undefined, ir.Constant(half, list(range(count))))
        upper = ir.Constant(half, list(range(count, 2 * count)))
        vector = combine(low, builder.shuffle_vector(vector, undefined, upper))
    return builder.extract_element(vector, ir.Constant(I32, 0))


def larger(builder: Any, left: Any, right: Any) -> Any:
    """The larger of two floats, lane by lane."""
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def for_rows(
    builder: Any, num_rows: Any, heights: Sequence[int], tile: Callable[[Any, int], None]
) -> None:
    """Cut ``num_rows`` (int64) into tiles, ``heights`` most first and down to 1.

    ``tile(first_row, rows)`` emits one; most tiles have the first height.
    """
    most = ir.Constant(I64, heights[0])
    num_tiles = builder.sdiv(num_rows, most)
    with cgutils.for_range(builder, num_tiles) as loop:
        tile(builder.mul(loop.index, most), heights[0])
    done = builder.mul(num_tiles, most)
    for height in heights[1:]:
        left = builder.sub(num_rows, done)
        fits = builder.icmp_signed(">=", left, ir.Constant(I64, height))
        with builder.if_then(fits):
            tile(done, height)
        taken = builder.select(fits, ir.Constant(I64, height), ir.Constant(I64, 0))
        done = builder.add(done, taken)


def for_balanced_rows(
    builder: Any, num_rows: Any, most: int, tile: Callable[[Any, int], None]
) -> None:
    """Cut ``num_rows`` (int64, ≥ 1) into the fewest tiles of up to ``most`` rows, equally high.

    ``tile(first_row, rows)`` emits one. A lone last row would wait for each of its own additions.
    """

    def constant_of(value: int) -> Any:
        return ir.Constant(I64, value)

    def of_height(first: Any, rows: Any) -> None:
        after = builder.append_basic_block("after.tile")
        switch = builder.switch(rows, after)
        for count in range(1, most + 1):
            block = builder.append_basic_block(f"tile.{count}")
            switch.add_case(constant_of(count), block)
            builder.position_at_end(block)
            tile(first, count)
            builder.branch(after)
        builder.position_at_end(after)

    above = builder.add(num_rows, constant_of(most - 1))
    num_tiles = builder.sdiv(above, constant_of(most))
    is_single = builder.icmp_signed("<=", num_rows, constant_of(most))
    # Division takes as long as a small tile.
    with builder.if_else(is_single) as (single, several):
        with single:
            whole = builder.basic_block
        with several:
            quotient = builder.sdiv(num_rows, num_tiles)
            remainder = builder.srem(num_rows, num_tiles)
            divided = builder.basic_block
    height, num_higher = builder.phi(I64), builder.phi(I64)
    height.add_incoming(num_rows, whole)
    height.add_incoming(quotient, divided)
    num_higher.add_incoming(constant_of(0), whole)
    num_higher.add_incoming(remainder, divided)
    with cgutils.for_range(builder, num_tiles) as loop:
        is_higher = builder.icmp_signed("<", loop.index, num_higher)
        higher = builder.select(is_higher, loop.index, num_higher)
        first = builder.add(builder.mul(loop.index, height), higher)
        of_height(first, builder.add(height, builder.zext(is_higher, I64)))


def accumulate(
    builder: Any, name: str, count: Any, initial: Sequence[Any],
    step: Callable[[Any, list[Any]], Sequence[Any]], *, rolled: bool = False,
) -> Sequence[Any]:  # fmt: skip
    """A loop of ``count`` ≥ 1 turns (int64) that keeps its totals in registers.

    ``step(index, totals)`` emits one turn and returns the new totals; the last ones are returned.
    With ``rolled`` LLVM must not unroll it.
    """
    before = builder.basic_block
    loop = builder.append_basic_block(f"{name}.loop")
    after = builder.append_basic_block(f"{name}.after")
    builder.branch(loop)

    builder.position_at_end(loop)
    index = builder.phi(I64)
    index.add_incoming(ir.Constant(I64, 0), before)
    totals = []
    for value in initial:
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        totals.append(phi)
    results = step(index, totals)
    following = builder.add(index, ir.Constant(I64, 1))
    last = builder.basic_block  # another than ``loop`` where the step itself loops
    index.add_incoming(following, last)
    for phi, value in zip(totals, results, strict=True):
        phi.add_incoming(value, last)
    back = builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    if rolled:
        back.set_metadata("llvm.loop", _never_unrolled(builder.module))

    builder.position_at_end(after)
    return results


def _never_unrolled(module: ir.Module) -> Any:
    """A loop's identity, which is a node that names itself first, and the wish."""
    wish = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    unlike_others = ir.MetaDataString(module, f"loop {len(module.metadata)}")
    identity = module.add_metadata([unlike_others, wish])
    identity.operands = (identity, wish)
    return identity
