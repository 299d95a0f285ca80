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

GROUP = 32
"""Consecutive k that share a scale."""
COLUMNS = 16
_STEPS = GROUP // 4
_HEADER_BYTES = 2 * COLUMNS * 2

_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_V64I8 = ir.VectorType(_I8, 64)
_V64I32 = ir.VectorType(_I32, 64)
_V16I32 = ir.VectorType(_I32, COLUMNS)
_V16F32 = ir.VectorType(_F32, COLUMNS)
_V16F16 = ir.VectorType(ir.HalfType(), COLUMNS)


def chunk_bytes(bits: int) -> int:
    """Size of one group of 16 columns: scales, offsets, codes."""
    return _HEADER_BYTES + COLUMNS * GROUP * bits // 8


@lru_cache
def has_vnni() -> bool:
    """Whether the host multiplies bytes in one instruction on 512-bit vectors."""
    features = llvm.get_host_cpu_features()
    return bool(features.get("avx512vnni") and features.get("avx512f"))


def _splat(builder: Any, scalar: Any, vector_type: ir.VectorType) -> Any:
    undefined = ir.Constant(vector_type, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    mask = ir.Constant(ir.VectorType(_I32, vector_type.count), [0] * vector_type.count)
    return builder.shuffle_vector(one, undefined, mask)


def _load(builder: Any, address: Any, offset: Any, kind: Any, align: int) -> Any:
    pointer = builder.inttoptr(builder.add(address, offset), kind.as_pointer())
    return builder.load(pointer, align=align)


def _every(builder: Any, value: Any, first: int) -> Any:
    """Elements first, first + 4, … of a vector of 64."""
    mask = ir.Constant(_V16I32, list(range(first, 64, 4)))
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)


def _dot4(builder: Any, total: Any, codes: Any, activations: Any) -> Any:
    """total[n] += Σ_i codes[4 n + i] * activations[i]; codes unsigned, activations a packed i32."""
    spread = _splat(builder, activations, _V16I32)
    if has_vnni():
        kind = ir.FunctionType(_V16I32, (_V16I32, _V16I32, _V16I32))
        name = "llvm.x86.avx512.vpdpbusd.512"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, (total, builder.bitcast(codes, _V16I32), spread))
    left = builder.zext(codes, _V64I32)
    right = builder.sext(builder.bitcast(spread, _V64I8), _V64I32)
    products = builder.mul(left, right)
    parts = [_every(builder, products, first) for first in range(4)]
    pairs = builder.add(builder.add(parts[0], parts[1]), builder.add(parts[2], parts[3]))
    return builder.add(total, pairs)


def _code_vectors(builder: Any, chunk: Any, bits: int) -> list[Any]:
    """The group's eight vectors of 64 unsigned codes."""

    def vector(index: int) -> Any:
        offset = ir.Constant(_I64, _HEADER_BYTES + 64 * index)
        return _load(builder, chunk, offset, _V64I8, 1)

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
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_V16F32, (_V16F32,) * 3), f"llvm.fma.v{COLUMNS}f32"
    )
    numbers = [ir.Constant(_I64, row) for row in range(rows)]
    a_rows = [builder.add(a, builder.mul(row, a_stride)) for row in numbers]
    s_rows = [builder.mul(row, s_stride) for row in numbers]
    zero_f = ir.Constant(_V16F32, [0.0] * COLUMNS)
    zero_i = ir.Constant(_V16I32, [0] * COLUMNS)
    before = builder.basic_block
    loop = builder.append_basic_block("tile.loop")
    after = builder.append_basic_block("tile.after")
    builder.branch(loop)

    builder.position_at_end(loop)
    group = builder.phi(_I64)
    group.add_incoming(ir.Constant(_I64, 0), before)
    totals = []
    for _ in range(rows):
        phi = builder.phi(_V16F32)
        phi.add_incoming(zero_f, before)
        totals.append(phi)
    chunk = builder.add(w, builder.mul(group, ir.Constant(_I64, chunk_bytes(bits))))
    a_offset = builder.mul(group, ir.Constant(_I64, GROUP))
    s_offset = builder.mul(group, ir.Constant(_I64, 4))
    sums = [zero_i] * rows
    for step, codes in enumerate(_code_vectors(builder, chunk, bits)):
        at = builder.add(a_offset, ir.Constant(_I64, 4 * step))
        for row in range(rows):
            sums[row] = _dot4(builder, sums[row], codes, _load(builder, a_rows[row], at, _I32, 4))
    zero = ir.Constant(_I64, 0)
    scale = builder.fpext(_load(builder, chunk, zero, _V16F16, 1), _V16F32)
    offset = ir.Constant(_I64, 2 * COLUMNS)
    minimum = builder.fpext(_load(builder, chunk, offset, _V16F16, 1), _V16F32)
    results = []
    for row in range(rows):
        at = builder.add(s_rows[row], s_offset)
        row_scale = _splat(builder, _load(builder, sa, at, _F32, 4), _V16F32)
        row_sum = _splat(builder, _load(builder, sum_a, at, _F32, 4), _V16F32)
        dot = builder.sitofp(sums[row], _V16F32)
        partial = builder.call(fma, (row_sum, minimum, totals[row]))
        results.append(builder.call(fma, (dot, builder.fmul(row_scale, scale), partial)))
    following = builder.add(group, ir.Constant(_I64, 1))
    group.add_incoming(following, loop)
    for phi, value in zip(totals, results, strict=True):
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, groups), loop, after)

    builder.position_at_end(after)
    for row, value in zip(numbers, results, strict=True):
        address = builder.add(c, builder.mul(row, c_stride))
        builder.store(value, builder.inttoptr(address, _V16F32.as_pointer()), align=4)
