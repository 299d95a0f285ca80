"""The inner tile of products with group-quantised weights, in vector registers.

    C[r, n] = Σ_g  sa[r, g] sw[g, n] · Σ_k a[r, k] q[k, n]  +  sum_a[r, g] m[g, n]

for 16 columns n, R rows r and groups g of 32 consecutive k. A weight is ``q * sw + m`` with
unsigned q (8 or 4 bits); an activation is ``a * sa`` with signed 8-bit a; ``sum_a`` is ``sa * Σ a``
of the group. The integer sums are exact and the order of the float additions is fixed, so a row's
result depends neither on R nor on the machine's instruction set.

Weights of 16 columns lie contiguously, one chunk per group, as they are read::

    | 16 x sw (fp16) | 16 x m (fp16) | 8 vectors of 64 bytes: (k..k+3) of column 0, of column 1, … |

4-bit chunks hold 4 vectors: low nibbles are vectors 0-3, high nibbles vectors 4-7. On x86 with VNNI
a vector step is one ``vpdpbusd``; elsewhere LLVM lowers the same sums to what the machine has.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import llvmlite.binding as llvm
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
    accumulate,
    fma,
    load,
    splat,
)

GROUP = 32
"""Consecutive k that share a scale."""
COLUMNS = LANES
_STEPS = GROUP // 4
_HEADER_BYTES = 2 * COLUMNS * 2

_V64I8 = ir.VectorType(I8, 64)
_V64I32 = ir.VectorType(I32, 64)


def chunk_bytes(bits: int) -> int:
    """Size of one group of 16 columns: scales, offsets, codes."""
    return _HEADER_BYTES + COLUMNS * GROUP * bits // 8


@lru_cache
def has_vnni() -> bool:
    """Whether the host multiplies bytes in one instruction on 512-bit vectors."""
    features = llvm.get_host_cpu_features()
    return bool(features.get("avx512vnni") and features.get("avx512f"))


def _every(builder: Any, value: Any, first: int) -> Any:
    """Elements first, first + 4, … of a vector of 64."""
    mask = ir.Constant(V16I32, list(range(first, 64, 4)))
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)


def _dot4(builder: Any, total: Any, codes: Any, activations: Any) -> Any:
    """total[n] += Σ_i codes[4 n + i] * activations[i]; codes unsigned, activations a packed i32."""
    spread = splat(builder, activations, V16I32)
    if has_vnni():
        kind = ir.FunctionType(V16I32, (V16I32, V16I32, V16I32))
        name = "llvm.x86.avx512.vpdpbusd.512"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, (total, builder.bitcast(codes, V16I32), spread))
    left = builder.zext(codes, _V64I32)
    right = builder.sext(builder.bitcast(spread, _V64I8), _V64I32)
    products = builder.mul(left, right)
    parts = [_every(builder, products, first) for first in range(4)]
    pairs = builder.add(builder.add(parts[0], parts[1]), builder.add(parts[2], parts[3]))
    return builder.add(total, pairs)


def _code_vectors(builder: Any, chunk: Any, bits: int) -> list[Any]:
    """The group's eight vectors of 64 unsigned codes."""

    def vector(index: int) -> Any:
        offset = ir.Constant(I64, _HEADER_BYTES + 64 * index)
        return load(builder, builder.add(chunk, offset), _V64I8, 1)

    if bits == 8:
        return [vector(index) for index in range(_STEPS)]
    packed = [vector(index) for index in range(_STEPS // 2)]
    four = ir.Constant(_V64I8, [4] * 64)
    low_mask = ir.Constant(_V64I8, [15] * 64)
    low = [builder.and_(value, low_mask) for value in packed]
    return low + [builder.lshr(value, four) for value in packed]


@intrinsic(prefer_literal=True)
def quantized_tile(
    typingctx: Any, rows: Any, bits: Any, a: Any, a_stride: Any, sa: Any, sum_a: Any,
    s_stride: Any, w: Any, groups: Any, c: Any, c_stride: Any,
) -> Any:  # fmt: skip
    """C[rows, 16] (float32, overwritten) from ``groups`` chunks of weights.

    ``rows`` and ``bits`` are compile-time constants. The rest is int64: addresses of the tile's
    first activation, scale, sum, weight chunk and output; strides between rows in bytes.
    """
    if not isinstance(rows, types.IntegerLiteral) or not isinstance(bits, types.IntegerLiteral):
        return None
    num_rows, num_bits = rows.literal_value, bits.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit_tile(builder, num_rows, num_bits, args[2:])
        return context.get_dummy_value()

    return types.void(rows, bits, *[types.int64] * 9), codegen


def _emit_tile(builder: Any, rows: int, bits: int, args: Any) -> None:
    a, a_stride, sa, sum_a, s_stride, w, groups, c, c_stride = args
    numbers = [ir.Constant(I64, row) for row in range(rows)]
    a_rows = [builder.add(a, builder.mul(row, a_stride)) for row in numbers]
    s_rows = [builder.mul(row, s_stride) for row in numbers]
    zero_f = ir.Constant(V16F32, [0.0] * COLUMNS)
    zero_i = ir.Constant(V16I32, [0] * COLUMNS)

    def step(group: Any, totals: list[Any]) -> list[Any]:
        chunk = builder.add(w, builder.mul(group, ir.Constant(I64, chunk_bytes(bits))))
        a_offset = builder.mul(group, ir.Constant(I64, GROUP))
        s_offset = builder.mul(group, ir.Constant(I64, 4))
        sums = [zero_i] * rows
        for number, codes in enumerate(_code_vectors(builder, chunk, bits)):
            at = builder.add(a_offset, ir.Constant(I64, 4 * number))
            for row in range(rows):
                activations = load(builder, builder.add(a_rows[row], at), I32, 4)
                sums[row] = _dot4(builder, sums[row], codes, activations)
        scale = builder.fpext(load(builder, chunk, V16F16, 1), V16F32)
        minimum_at = builder.add(chunk, ir.Constant(I64, 2 * COLUMNS))
        minimum = builder.fpext(load(builder, minimum_at, V16F16, 1), V16F32)
        results = []
        for row in range(rows):
            at = builder.add(s_rows[row], s_offset)
            row_scale = splat(builder, load(builder, builder.add(sa, at), F32, 4), V16F32)
            row_sum = splat(builder, load(builder, builder.add(sum_a, at), F32, 4), V16F32)
            dot = builder.sitofp(sums[row], V16F32)
            partial = fma(builder, row_sum, minimum, totals[row])
            results.append(fma(builder, dot, builder.fmul(row_scale, scale), partial))
        return results

    results = accumulate(builder, "tile", groups, [zero_f] * rows, step)
    for row, value in zip(numbers, results, strict=True):
        address = builder.add(c, builder.mul(row, c_stride))
        builder.store(value, builder.inttoptr(address, V16F32.as_pointer()), align=4)
