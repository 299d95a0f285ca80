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
from numba.core import cgutils
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

_IS_WIDE = LEVEL in (CpuLevel.AVX512, CpuLevel.AVX512_VNNI)

TILE_ROWS = 12 if _IS_WIDE else 6
"""Most rows of C in a tile."""

_SUMS_BESIDE = 24 if _IS_WIDE else 4
"""Vectors of 16 sums that fit beside several vectors of B: 24 of AVX-512's 32 registers, 8 of the
16 of AVX2, which holds a vector in two."""

_MOST_VECTORS = 4


def tile_vectors(rows: int) -> int:
    """Vectors of 16 columns that a tile of so many rows takes side by side: 1, 2 or 4."""
    fitting = min(_MOST_VECTORS, max(1, _SUMS_BESIDE // rows))
    return 1 << (fitting.bit_length() - 1)


@intrinsic(prefer_literal=True)
def fma_rows(
    typingctx: Any, adds: Any, rows: Any, vectors: Any, source: Any, a: Any, a_stride: Any,
    b: Any, b_stride: Any, b_step: Any, c: Any, c_stride: Any, k: Any,
) -> Any:  # fmt: skip
    """C[rows, 16 * vectors] = A[rows, k] · B[k, 16 * vectors], added to C if ``adds``.

    ``adds`` is a compile-time constant; ``source`` is any array of B's format (see
    ``intrinsics.widen``), A and C are float32. ``a``, ``b``, ``c`` are int64 addresses; strides are
    row strides in elements, ``b_step`` elements lie from one vector of B to the next; ``rows``,
    ``vectors`` and ``k`` ≥ 1.
    """
    if not isinstance(adds, types.IntegerLiteral):
        return None
    to_c = adds.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        num_rows, num_vectors, _, a, a_stride, b, b_stride, b_step, c, c_stride, k = args[1:]
        four, item = ir.Constant(I64, 4), ir.Constant(I64, source.dtype.bitwidth // 8)
        a_step, c_step = builder.mul(a_stride, four), builder.mul(c_stride, four)
        b_row, b_vector = builder.mul(b_stride, item), builder.mul(b_step, item)

        def of_rows(first_row: Any, count: int) -> None:
            a_at = builder.add(a, builder.mul(first_row, a_step))
            c_at = builder.add(c, builder.mul(first_row, c_step))

            def tiles(first: Any, number: Any, width: int) -> None:
                with cgutils.for_range(builder, number) as loop:
                    index = builder.mul(loop.index, ir.Constant(I64, width))
                    vector = builder.add(first, index)
                    b_at = builder.add(b, builder.mul(vector, b_vector))
                    c_of = builder.add(c_at, builder.mul(vector, ir.Constant(I64, 4 * LANES)))
                    _emit(
                        builder, count, width, to_c, source.dtype,
                        (a_at, a_step, b_at, b_row, b_vector, c_of, c_step, k),
                    )  # fmt: skip

            width = ir.Constant(I64, tile_vectors(count))
            whole = builder.sdiv(num_vectors, width)
            tiles(ir.Constant(I64, 0), whole, tile_vectors(count))
            if tile_vectors(count) > 1:
                done = builder.mul(whole, width)
                tiles(done, builder.sub(num_vectors, done), 1)

        for_balanced_rows(builder, num_rows, TILE_ROWS, of_rows)
        return context.get_dummy_value()

    kinds = (adds, types.intp, types.intp, source, *[types.int64] * 8)
    return types.void(*kinds), codegen


def _emit(builder: Any, rows: int, vectors: int, adds: int, stored: Any, args: Any) -> None:
    """One tile; all steps are in bytes."""
    a, a_step, b, b_row, b_vector, c, c_step, k = args
    numbers = [ir.Constant(I64, row) for row in range(rows)]
    a_rows = [builder.add(a, builder.mul(a_step, row)) for row in numbers]
    c_rows = [builder.add(c, builder.mul(c_step, row)) for row in numbers]
    c_at = [
        builder.add(c_rows[row], ir.Constant(I64, 4 * LANES * vector))
        for row in range(rows)
        for vector in range(vectors)
    ]
    b_at = [
        builder.add(b, builder.mul(b_vector, ir.Constant(I64, vector))) for vector in range(vectors)
    ]
    zero = constant(V16F32, 0.0)
    initial = [load(builder, at, V16F32, 4) if adds else zero for at in c_at]

    def step(index: Any, totals: list[Any]) -> list[Any]:
        b_offset = builder.mul(index, b_row)
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
