"""The inner tile of float32 products, in vector registers: C[R, 16 n] += A[R, K] · B[K, 16 n].

Emitted as LLVM vector IR, which numba compiles for the machine at hand. Written by hand because
LLVM does not keep the accumulators of the equivalent loop nest in registers. Every element of C is
one chain of fused multiply-adds over k, so neither the tile's shape nor the machine changes a bit
of it. B is read in any of the KV cache's formats and widened in registers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.backends.cpu.intrinsics import widen
from engine.backends.cpu.level import LEVEL, CpuLevel
from engine.backends.cpu.vector_ir import (
    F32,
    I64,
    LANES,
    V16F32,
    accumulate,
    constant,
    fma,
    for_balanced_rows,
    load,
    splat,
)

_NUM_REGISTERS = 32 if LEVEL in (CpuLevel.AVX512, CpuLevel.AVX512_VNNI) else 16
"""Vectors of 16 lanes at best; of AVX2's and NEON's narrower ones, what is worth the same."""

TILE_ROWS = 6
"""Most rows of C in a tile of one vector: 6 x 16 floats are 12 of AVX2's 16 registers."""

TILE_VECTORS = 4 if _NUM_REGISTERS == 32 else 1
"""Vectors of 16 per row of C that the machine's registers hold beside ``TILE_ROWS`` rows."""


@intrinsic(prefer_literal=True)
def fma_rows(
    typingctx: Any, vectors: Any, most_rows: Any, adds: Any, rows: Any, source: Any,
    a: Any, a_stride: Any, b: Any, b_stride: Any, b_step: Any, c: Any, c_stride: Any, k: Any,
) -> Any:  # fmt: skip
    """C[rows, 16 * vectors] = A[rows, k] · B[k, 16 * vectors], added to C if ``adds``.

    ``vectors``, ``most_rows`` (of a tile) and ``adds`` are compile-time constants; ``source`` is
    any array of B's format (see ``intrinsics.widen``), A and C are float32. ``a``, ``b``, ``c``
    are int64 addresses; strides are row strides in elements, ``b_step`` elements lie from one
    vector of B to the next; ``rows`` and ``k`` ≥ 1.
    """
    literals = (vectors, most_rows, adds)
    if not all(isinstance(literal, types.IntegerLiteral) for literal in literals):
        return None
    num_vectors, most, to_c = (literal.literal_value for literal in literals)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        num_rows, _, a, a_stride, b, b_stride, b_step, c, c_stride, k = args[3:]
        four = ir.Constant(I64, 4)
        a_step, c_step = builder.mul(a_stride, four), builder.mul(c_stride, four)

        def tile(first_row: Any, count: int) -> None:
            a_at = builder.add(a, builder.mul(first_row, a_step))
            c_at = builder.add(c, builder.mul(first_row, c_step))
            _emit(
                builder, count, num_vectors, to_c, source.dtype,
                (a_at, a_step, b, b_stride, b_step, c_at, c_step, k),
            )  # fmt: skip

        for_balanced_rows(builder, num_rows, most, tile)
        return context.get_dummy_value()

    kinds = (vectors, most_rows, adds, types.intp, source, *[types.int64] * 8)
    return types.void(*kinds), codegen


def _emit(builder: Any, rows: int, vectors: int, adds: int, stored: Any, args: Any) -> None:
    """One tile; strides of A and C are in bytes."""
    a, a_step, b, b_stride, b_step, c, c_step, k = args
    item_bytes = ir.Constant(I64, stored.bitwidth // 8)
    numbers = [ir.Constant(I64, row) for row in range(rows)]
    a_rows = [builder.add(a, builder.mul(a_step, row)) for row in numbers]
    c_rows = [builder.add(c, builder.mul(c_step, row)) for row in numbers]
    c_at = [
        builder.add(c_rows[row], ir.Constant(I64, 4 * LANES * vector))
        for row in range(rows)
        for vector in range(vectors)
    ]
    b_at = [
        builder.add(b, builder.mul(builder.mul(b_step, ir.Constant(I64, vector)), item_bytes))
        for vector in range(vectors)
    ]
    zero = constant(V16F32, 0.0)
    initial = [load(builder, at, V16F32, 4) if adds else zero for at in c_at]

    def step(index: Any, totals: list[Any]) -> list[Any]:
        b_offset = builder.mul(builder.mul(index, b_stride), item_bytes)
        b_vectors = [widen(builder, builder.add(at, b_offset), stored) for at in b_at]
        a_offset = builder.mul(index, ir.Constant(I64, 4))
        results = []
        for row in range(rows):
            at = builder.add(a_rows[row], a_offset)
            scalar = splat(builder, load(builder, at, F32, 4), V16F32)
            for vector in range(vectors):
                total = totals[row * vectors + vector]
                results.append(fma(builder, scalar, b_vectors[vector], total))
        return results

    results = accumulate(builder, "fma", k, initial, step)
    for value, at in zip(results, c_at, strict=True):
        builder.store(value, builder.inttoptr(at, V16F32.as_pointer()), align=4)
