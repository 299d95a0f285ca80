"""Pieces of LLVM vector IR that the hand-written kernels share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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


def fma(builder: Any, left: Any, right: Any, total: Any) -> Any:
    """left * right + total, rounded once, on vectors of 16 float32."""
    kind = ir.FunctionType(V16F32, (V16F32,) * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    return builder.call(function, (left, right, total))


def accumulate(
    builder: Any, name: str, count: Any, initial: Sequence[Any],
    step: Callable[[Any, list[Any]], Sequence[Any]],
) -> Sequence[Any]:  # fmt: skip
    """A loop of ``count`` ≥ 1 turns (int64) that keeps its totals in registers.

    ``step(index, totals)`` emits one turn and returns the new totals; the last ones are returned.
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
    index.add_incoming(following, loop)
    for phi, value in zip(totals, results, strict=True):
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)

    builder.position_at_end(after)
    return results
