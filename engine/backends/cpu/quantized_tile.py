"""The inner tile of products with group-quantised weights, in vector registers.

    C[r, n] = Σ_g  sa[r, g] sw[g, n] · Σ_k a[r, k] q[k, n]  +  sum_a[r, g] m[g, n]

for 16 columns n, R rows r and groups g of 32 consecutive k. A weight is ``q * sw + m`` with
unsigned q (8 or 4 bits); an activation is ``a * sa`` with signed 8-bit a; ``sum_a`` is ``sa * Σ a``
of the group. The integer sums are exact and the order of the float additions is fixed, so a row's
result depends neither on R nor on the machine's instruction set.

Weights of 16 columns lie contiguously, one chunk per group, as they are read::

    | 16 x sw (fp16) | 16 x m (fp16) | 8 vectors of 64 bytes: (k..k+3) of column 0, of column 1, … |

4-bit chunks hold 4 vectors: low nibbles are vectors 0-3, high nibbles vectors 4-7.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.backends.cpu.byte_products import GROUP, ByteProducts, byte_products, group_sums
from engine.backends.cpu.level import LEVEL
from engine.backends.cpu.vector_ir import (
    F32,
    I64,
    LANES,
    accumulate,
    constant,
    fma,
    for_balanced_rows,
    for_rows,
    load,
    splat,
)

COLUMNS = LANES
_HEADER_BYTES = 2 * COLUMNS * 2


def chunk_bytes(bits: int) -> int:
    """Size of one group of 16 columns: scales, offsets, codes."""
    return _HEADER_BYTES + COLUMNS * GROUP * bits // 8


@intrinsic(prefer_literal=True)
def quantized_rows(
    typingctx: Any, bits: Any, rows: Any, a: Any, a_stride: Any, sa: Any, sum_a: Any,
    s_stride: Any, w: Any, groups: Any, c: Any, c_stride: Any,
) -> Any:  # fmt: skip
    """C[rows, 16] (float32, overwritten) from ``groups`` chunks of weights.

    ``bits`` is a compile-time constant. The rest is int64: the number of rows; addresses of the
    first activation, scale, sum, weight chunk and output; strides between rows in bytes.
    Activations are of the level's type and order, see ``quantize_row``.
    """
    if not isinstance(bits, types.IntegerLiteral):
        return None
    num_bits = bits.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_rows(builder, byte_products(LEVEL, num_bits), num_bits, args[1:])
        return context.get_dummy_value()

    return types.void(bits, *[types.int64] * 10), codegen


def emit_rows(builder: Any, products: ByteProducts, bits: int, args: Any) -> None:
    """``quantized_rows`` for any level's products; ``args`` are its arguments after ``bits``."""
    rows, a, a_stride, sa, sum_a, s_stride, w, groups, c, c_stride = args

    def tile(first: Any, height: int) -> None:
        def of_rows(start: Any, stride: Any) -> list[Any]:
            numbers = (builder.add(first, ir.Constant(I64, row)) for row in range(height))
            return [builder.add(start, builder.mul(number, stride)) for number in numbers]

        addresses = (
            of_rows(a, a_stride), of_rows(sa, s_stride), of_rows(sum_a, s_stride),
            of_rows(c, c_stride),
        )  # fmt: skip
        _emit_tile(builder, products, bits, addresses, w, groups)

    if products.rolled:
        for_balanced_rows(builder, rows, products.most_rows, tile)
    else:  # each height is much code
        for_rows(builder, rows, (products.most_rows, 8, 4, 2, 1), tile)


def _emit_tile(
    builder: Any, products: ByteProducts, bits: int, addresses: Any, w: Any, groups: Any
) -> None:
    a_rows, scale_rows, sum_rows, c_rows = addresses
    floats = ir.VectorType(F32, products.lanes)
    halves = ir.VectorType(ir.HalfType(), products.lanes)
    parts = range(COLUMNS // products.lanes)
    item_bytes = products.activation_dtype().itemsize

    def step(group: Any, totals: list[Any]) -> list[Any]:
        chunk = builder.add(w, builder.mul(group, ir.Constant(I64, chunk_bytes(bits))))
        a_offset = builder.mul(group, ir.Constant(I64, GROUP * item_bytes))
        codes = builder.add(chunk, ir.Constant(I64, _HEADER_BYTES))
        activations = [builder.add(row, a_offset) for row in a_rows]
        sums = group_sums(builder, products, bits, codes, activations)

        def header(first: int, part: int) -> Any:
            offset = ir.Constant(I64, 2 * (first + products.lanes * part))
            return builder.fpext(load(builder, builder.add(chunk, offset), halves, 1), floats)

        scales = [header(0, part) for part in parts]
        minima = [header(COLUMNS, part) for part in parts]
        s_offset = builder.mul(group, ir.Constant(I64, 4))
        results = []
        for row, of_row in enumerate(sums):
            row_scale, row_sum = (
                splat(builder, load(builder, builder.add(at[row], s_offset), F32, 4), floats)
                for at in (scale_rows, sum_rows)
            )
            for part in parts:
                dot = builder.sitofp(of_row[part], floats)
                total = totals[row * len(parts) + part]
                partial = fma(builder, row_sum, minima[part], total)
                scale = builder.fmul(row_scale, scales[part])
                results.append(fma(builder, dot, scale, partial))
        return results

    zeros = [constant(floats, 0.0)] * (len(c_rows) * len(parts))
    results = accumulate(builder, "tile", groups, zeros, step)
    for row, address in enumerate(c_rows):
        for part in parts:
            at = builder.add(address, ir.Constant(I64, 4 * products.lanes * part))
            value = results[row * len(parts) + part]
            builder.store(value, builder.inttoptr(at, floats.as_pointer()), align=4)
