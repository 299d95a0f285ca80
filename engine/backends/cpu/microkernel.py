"""The inner tile of attention's products, in vector registers: C[R, 16 n] += A[R, K] · B[K, 16 n].

Emitted as LLVM vector IR, which numba compiles for the machine at hand. Written by hand because
LLVM does not keep the accumulators of the equivalent loop nest in registers. Every element of C is
one chain of fused multiply-adds over k, so neither the tile's shape nor the machine changes a bit
of it. B is read in any of the KV cache's formats and widened in registers.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.backends.cpu.intrinsics import widen
from engine.backends.cpu.vector_ir import F32, I64, LANES, V16F32, accumulate, fma, load, splat

TILE_ROWS = 6
"""Most rows of C per call: 6 x 16 floats are 12 of AVX2's 16 registers."""


TILE_VECTORS = 4 if llvm.get_host_cpu_features().get("avx512f") else 1
"""Vectors of 16 per row of C that the machine's registers hold beside ``TILE_ROWS`` rows."""


@intrinsic(prefer_literal=True)
def fma_rows(
    typingctx: Any, vectors: Any, adds: Any, rows: Any, source: Any, a: Any, a_stride: Any,
    b: Any, b_stride: Any, c: Any, c_stride: Any, k: Any,
) -> Any:  # fmt: skip
    """C[rows, 16 * vectors] = A[rows, k] · B[k, 16 * vectors], added to C if ``adds``.

    ``vectors`` and ``adds`` are compile-time constants; ``source`` is any array of B's format
    (see ``intrinsics.widen``), A and C are float32. ``a``, ``b``, ``c`` are int64 addresses;
    strides are row strides in elements; ``rows`` and ``k`` ≥ 1.
    """
    if not isinstance(vectors, types.IntegerLiteral):
        return None
    if not isinstance(adds, types.IntegerLiteral):
        return None
    num_vectors, to_c = vectors.literal_value, adds.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        num_rows, _, a, a_stride, b, b_stride, c, c_stride, k = args[2:]
        four = ir.Constant(I64, 4)
        a_step, c_step = builder.mul(a_stride, four), builder.mul(c_stride, four)

        def tile(first_row: Any, count: int) -> None:
            a_at = builder.add(a, builder.mul(first_row, a_step))
            c_at = builder.add(c, builder.mul(first_row, c_step))
            _emit(
                builder, count, num_vectors, to_c, source.dtype,
                (a_at, a_step, b, b_stride, c_at, c_step, k),
            )  # fmt: skip

        whole = ir.Constant(I64, TILE_ROWS)
        num_tiles = builder.sdiv(num_rows, whole)
        with cgutils.for_range(builder, num_tiles) as loop:
            tile(builder.mul(loop.index, whole), TILE_ROWS)
        done = builder.mul(num_tiles, whole)
        rest = builder.sub(num_rows, done)
        for count in range(1, TILE_ROWS):
            with builder.if_then(builder.icmp_signed("==", rest, ir.Constant(I64, count))):
                tile(done, count)
        return context.get_dummy_value()

    return types.void(vectors, adds, types.intp, source, *[types.int64] * 7), codegen


def _emit(builder: Any, rows: int, vectors: int, adds: int, stored: Any, args: Any) -> None:
    """One tile; strides of A and C are in bytes."""
    a, a_step, b, b_stride, c, c_step, k = args
    item_bytes = ir.Constant(I64, stored.bitwidth // 8)
    numbers = [ir.Constant(I64, row) for row in range(rows)]
    a_rows = [builder.add(a, builder.mul(a_step, row)) for row in numbers]
    c_rows = [builder.add(c, builder.mul(c_step, row)) for row in numbers]
    c_at = [
        builder.add(c_rows[row], ir.Constant(I64, 4 * LANES * vector))
        for row in range(rows)
        for vector in range(vectors)
    ]
    zero = ir.Constant(V16F32, [0.0] * LANES)
    initial = [load(builder, at, V16F32, 4) if adds else zero for at in c_at]

    def step(index: Any, totals: list[Any]) -> list[Any]:
        b_row = builder.add(b, builder.mul(builder.mul(index, b_stride), item_bytes))
        b_vectors = []
        for vector in range(vectors):
            at = builder.add(b_row, ir.Constant(I64, LANES * vector * stored.bitwidth // 8))
            b_vectors.append(widen(builder, at, stored))
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
