"""Products of int8 weights and activations quantised per token."""

from __future__ import annotations

import pytest
import torch

from engine.backends.gpu.kernels.linear import int8_matmul
from engine.backends.gpu.kernels.linear.int8_matmul_dynamic import (
    QuantisedTokens,
    int8_matmul_dynamic,
    quantise_tokens,
    reference,
)

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


def activations(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of different magnitudes, of a wider tensor with NaN beside them."""
    wide = torch.full((m, k + 24), float("nan"), dtype=dtype)
    wide[:, 8 : 8 + k] = torch.randn(m, k) * torch.logspace(-2, 2, m)[:, None]
    return wide[:, 8 : 8 + k]


def case(m: int, n: int, k: int, dtype: torch.dtype, *, bias: bool = False) -> None:
    values, scales = int8_matmul.quantise(torch.randn(n, k))
    packed = int8_matmul.pack(values, 8)
    x = activations(m, k, dtype)
    offsets = torch.randn(n) if bias else None
    out = torch.full((m, n + 8), float("nan"), dtype=dtype)[:, :n]
    tokens = QuantisedTokens.allocate(x.device, m + 1, k)
    tokens.values.fill_(-128)
    tokens.scales.fill_(float("nan"))
    assert int8_matmul_dynamic(x, packed, scales, offsets, out=out, tokens=tokens) is out
    expected = reference(tokens, m, packed, scales, offsets, k)
    largest = expected.abs().amax(dim=1, keepdim=True)
    error = (out.to(torch.float64) - expected).abs() / largest.clamp(min=1e-30)
    assert float(error.max()) <= ROUNDING[dtype]  # NaN fails
    assert bool((tokens.values[m] == -128).all())


@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_types(dtype: torch.dtype) -> None:
    case(3, 140, 256, dtype, bias=True)


@pytest.mark.parametrize("m", [1, 17, 70])
def test_paths_by_number_of_tokens(m: int) -> None:
    case(m, 150, 128, torch.bfloat16)


@pytest.mark.parametrize("k", [1, 63, 64, 65, 192, 2100])
def test_sizes_that_are_not_whole_blocks(k: int) -> None:
    case(2, 20, k, torch.float32)


@pytest.mark.parametrize("k", [64, 100, 2100])
def test_quantised_tokens_are_within_half_a_step(k: int) -> None:
    x = activations(4, k, torch.float32)
    x[2] = 0.0
    tokens = QuantisedTokens.allocate(x.device, 4, k)
    quantise_tokens(x, tokens)
    values = tokens.unpacked(4, k)
    assert torch.equal(values[2], torch.zeros(k, dtype=torch.int8))
    error = (values * tokens.scales[:, None] - x).abs()
    assert bool((error <= tokens.scales[:, None] * 0.5001).all())


def test_room_may_be_left_out() -> None:
    values, scales = int8_matmul.quantise(torch.randn(8, 64))
    packed = int8_matmul.pack(values, 8)
    out = torch.full((2, 8), float("nan"))
    int8_matmul_dynamic(torch.randn(2, 64), packed, scales, None, out=out)
    assert not torch.isnan(out).any()
    empty = torch.empty(0, 8)
    int8_matmul_dynamic(torch.empty(0, 64), packed, scales, None, out=empty)
