"""W8A8: int8 weights with a scale per output times activations quantised per token on the way.

Twice the matrix rate of 16-bit products, for many tokens. The weights are those of
``int8_matmul``, in its packed order; the quantised activations take the same order of K, so the
product reads bytes and never unpacks a word.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.backends.gpu.kernels.linear.packed_weights import WORDS, unit_of, unpack
from engine.backends.gpu.kernels.linear.tile_order import grouped_tile
from engine.backends.gpu.tuning import LaunchConfig, launch_config
from engine.backends.gpu.variant import Variant

_UNIT = unit_of(8)
_MAX_K = 1 << 17  # int32 sums: K * 127 * 127 < 2^31


@dataclass(slots=True, frozen=True)
class QuantisedTokens:
    """Room for quantised activations; what one product writes, the next may overwrite."""

    values: torch.Tensor
    """[tokens, K rounded up to 64] int8, in the packed order."""
    scales: torch.Tensor
    """[tokens] float32."""

    @classmethod
    def allocate(cls, device: torch.device, num_tokens: int, size: int) -> QuantisedTokens:
        """For up to ``num_tokens`` rows of K = ``size``."""
        padded = -(-size // _UNIT) * _UNIT
        return cls(
            torch.empty(num_tokens, padded, dtype=torch.int8, device=device),
            torch.empty(num_tokens, dtype=torch.float32, device=device),
        )

    def unpacked(self, num_tokens: int, size: int) -> torch.Tensor:
        """The values as a matrix, [num_tokens, K = ``size``] int8."""
        words = self.values[:num_tokens].contiguous().view(torch.int32)
        return unpack(words.view(num_tokens, -1, WORDS).permute(1, 0, 2), 8, size)


@triton.jit
def quantise_tokens_kernel(
    x_ptr, values_ptr, scales_ptr, size, padded, stride_x, stride_values, BLOCK: tl.constexpr
):
    """One program per token: its largest magnitude, then its values in the packed order."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x_ptr += row * stride_x
    values_ptr += row * stride_values
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, size, BLOCK):
        inside = columns < size - start
        x = tl.load(x_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    amax = tl.max(largest, axis=0)
    tl.store(scales_ptr + row, amax / 127.0)
    factor = tl.where(amax > 0.0, 127.0 / tl.maximum(amax, 1e-30), 0.0)
    for start in range(0, padded, BLOCK):
        inside = columns < size - start
        x = tl.load(x_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
        # the nearest integer, halves to even: past 2^23 a float32 has no fraction
        rounded = (x * factor + 12582912.0) - 12582912.0
        values = tl.minimum(tl.maximum(rounded, -127.0), 127.0).to(tl.int8)
        # [unit, plane, word, half] → [unit, word, half, plane], the order of a word's bytes
        ordered = values.reshape(BLOCK // 64, 2, 16, 2).permute(0, 2, 3, 1).reshape(BLOCK)
        tl.store(values_ptr + start + columns, ordered, mask=columns < padded - start)


@triton.jit(do_not_specialize=["M"])
def int8_matmul_dynamic_kernel(
    values_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    num_units,
    stride_values,
    stride_om,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
    TILE_GROUP: tl.constexpr,
):
    """``out[m, n] = x_scale[m] * scale[n] * sum_k values[m, k] * w[n, k] + bias[n]``.

    EVEN: ``num_units`` is a multiple of BLOCK_UNITS, which are taken at a time.
    """
    program = tl.program_id(0)
    tile_m, tile_n = grouped_tile(program, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), TILE_GROUP)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_rows = tl.minimum(m, M - 1).to(tl.int64)
    n_rows = tl.minimum(n, N - 1)
    k = tl.arange(0, BLOCK_UNITS * 64)
    unit = k // 64
    weight_ptrs = weight_ptr + unit.to(tl.int64)[None, :] * N * 64
    weight_ptrs += n_rows[:, None] * 64 + (k % 64)[None, :]
    values_ptrs = values_ptr + m_rows[None, :] * stride_values + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.int32)
    for first in range(0, num_units, BLOCK_UNITS):
        if EVEN:
            weight = tl.load(weight_ptrs)
            values = tl.load(values_ptrs)
        else:
            weight = tl.load(weight_ptrs, mask=unit[None, :] < num_units - first, other=0)
            values = tl.load(values_ptrs, mask=unit[:, None] < num_units - first, other=0)
        acc = tl.dot(weight, values, acc, out_dtype=tl.int32)
        weight_ptrs += N.to(tl.int64) * BLOCK_UNITS * 64
        values_ptrs += BLOCK_UNITS * 64
    x_scales = tl.load(x_scales_ptr + m_rows)
    scales = tl.load(scales_ptr + n_rows)
    product = acc.to(tl.float32) * scales[:, None] * x_scales[None, :]
    if HAS_BIAS:
        product += tl.load(bias_ptr + n_rows).to(tl.float32)[:, None]
    out_ptrs = out_ptr + m.to(tl.int64)[None, :] * stride_om + n[:, None]
    valid = (m[None, :] < M) & (n[:, None] < N)
    tl.store(out_ptrs, product.to(out_ptr.dtype.element_ty), mask=valid)


def int8_matmul_dynamic(
    x: torch.Tensor,
    weight_q: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    tokens: QuantisedTokens | None = None,
) -> torch.Tensor:
    """``quantised(x) @ w.T + bias``.

    Args:
        x: [M, K], unit stride in K.
        weight_q: [ceil(K / 64), N, 16] int32, from ``int8_matmul.pack(values, 8)``.
        scales: [N] float32.
        bias: [N] or None.
        out: [M, N], unit stride in N.
        tokens: room for M quantised rows; None: it is allocated.
    """
    num_tokens, size = x.shape
    num_units, num_outputs, num_words = weight_q.shape
    assert num_words == WORDS
    assert num_units == -(-size // _UNIT)
    assert size <= _MAX_K
    assert out.shape == (num_tokens, num_outputs)
    assert x.stride(1) == 1
    assert out.stride(1) == 1
    assert weight_q.is_contiguous()
    if num_tokens == 0:
        return out
    if tokens is None:
        tokens = QuantisedTokens.allocate(x.device, num_tokens, size)
    quantise_tokens(x, tokens)
    config = launch_config("int8_matmul_dynamic", m=num_tokens)
    meta = config.meta
    tiles = triton.cdiv(num_tokens, meta["BLOCK_M"]) * triton.cdiv(num_outputs, meta["BLOCK_N"])
    int8_matmul_dynamic_kernel[(tiles,)](
        tokens.values,
        tokens.scales,
        weight_q.view(torch.int8),
        scales,
        scales if bias is None else bias,
        out,
        num_tokens,
        num_outputs,
        num_units,
        tokens.values.stride(0),
        out.stride(0),
        HAS_BIAS=bias is not None,
        EVEN=num_units % meta["BLOCK_UNITS"] == 0,
        BLOCK_M=meta["BLOCK_M"],
        BLOCK_N=meta["BLOCK_N"],
        BLOCK_UNITS=meta["BLOCK_UNITS"],
        TILE_GROUP=meta["TILE_GROUP"],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def quantise_tokens(x: torch.Tensor, tokens: QuantisedTokens) -> None:
    """Quantise the rows of x, symmetrically to -127 .. 127, into ``tokens``."""
    num_tokens, size = x.shape
    padded = -(-size // _UNIT) * _UNIT
    assert tokens.values.shape[0] >= num_tokens
    assert tokens.values.shape[1] >= padded
    config = launch_config("quantise_tokens")
    quantise_tokens_kernel[(num_tokens,)](
        x,
        tokens.values,
        tokens.scales,
        size,
        padded,
        x.stride(0),
        tokens.values.stride(0),
        BLOCK=config.meta["BLOCK"],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def reference(
    tokens: QuantisedTokens,
    num_tokens: int,
    weight_q: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    size: int,
) -> torch.Tensor:
    """The product of quantised tokens in float64, [num_tokens, N], with K = ``size``.

    Of the tokens as they were quantised: a value halfway between two may have become either.
    """
    weight = unpack(weight_q, 8, size).double() * scales.double()[:, None]
    values = tokens.unpacked(num_tokens, size).double()
    product = values * tokens.scales[:num_tokens, None].double() @ weight.T
    return product if bias is None else product + bias.double()


def variants() -> list[Variant]:
    """Both kernels; the product's machine code does not depend on the activations' type."""
    return [
        _quantise_variant(launch_config("quantise_tokens")),
        *(
            _product_variant(f"m {m}", launch_config("int8_matmul_dynamic", m=m))
            for m in (16, 64, 1024)
        ),
    ]


def _quantise_variant(config: LaunchConfig) -> Variant:
    return Variant(
        name="quantise",
        fn=quantise_tokens_kernel,
        signature={
            "x_ptr": "*bf16:16",
            "values_ptr": "*i8:16",
            "scales_ptr": "*fp32:16",
            "size": "i32:16",
            "padded": "i32:16",
            "stride_x": "i32:16",
            "stride_values": "i32:16",
        },
        constexprs={"BLOCK": config.meta["BLOCK"]},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _product_variant(name: str, config: LaunchConfig) -> Variant:
    return Variant(
        name=name,
        fn=int8_matmul_dynamic_kernel,
        signature={
            "values_ptr": "*i8:16",
            "x_scales_ptr": "*fp32:16",
            "weight_ptr": "*i8:16",
            "scales_ptr": "*fp32:16",
            "bias_ptr": "*fp32:16",
            "out_ptr": "*bf16:16",
            "M": "i32",
            "N": "i32:16",
            "num_units": "i32",
            "stride_values": "i32:16",
            "stride_om": "i32:16",
        },
        constexprs={"HAS_BIAS": False, "EVEN": True, **config.meta},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
