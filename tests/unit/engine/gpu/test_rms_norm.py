"""RMS norm: widths, types, strides, the residual stream."""

from __future__ import annotations

import pytest
import torch

from engine.backends.gpu.kernels.rms_norm import add_rms_norm, reference, rms_norm

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def rows(num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a wider tensor, with NaN beside them."""
    wide = torch.full((num_rows, width + 24), float("nan"), dtype=dtype)
    wide[:, 8 : 8 + width] = torch.randn(num_rows, width) * 3
    return wide[:, 8 : 8 + width]


def poisoned(num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((num_rows, width + 8), float("nan"), dtype=dtype)[:, :width]


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    limit = ROUNDING[out.dtype] * expected.abs() + 1e-6
    assert bool(((out.to(torch.float64) - expected).abs() <= limit).all())  # NaN fails


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 576), (2, 1024), (5, 100), (1, 4100)])
def test_norm(num_rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = rows(num_rows, width, dtype), torch.randn(width)
    out = poisoned(num_rows, width, dtype)
    assert rms_norm(x, weight, 1e-5, out=out) is out
    assert_close(out, reference(x.to(torch.float64), None, weight, 1e-5))


@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_adding_changes_the_residual_in_place_and_nothing_beside_it(dtype: torch.dtype) -> None:
    x, residual, weight = rows(4, 300, dtype), rows(4, 300, dtype), torch.randn(300)
    beside = residual.as_strided((4, 8), (residual.stride(0), 1), 0)
    expected_residual = residual + x
    out = poisoned(4, 300, dtype)
    add_rms_norm(x, residual, weight, 1e-6, out=out)
    assert torch.equal(residual, expected_residual)
    assert bool(torch.isnan(beside).all())
    assert_close(out, reference(residual.to(torch.float64), None, weight, 1e-6))


def test_a_float32_residual_stream_beside_16_bit_activations() -> None:
    x, residual, weight = rows(2, 64, torch.bfloat16), rows(2, 64, torch.float32), torch.randn(64)
    wide = residual.to(torch.float64)
    expected = reference(x.to(torch.float64), wide, weight, 1e-6)
    out = poisoned(2, 64, torch.bfloat16)
    add_rms_norm(x, residual, weight, 1e-6, out=out)
    assert_close(residual, wide)
    assert_close(out, expected)


def test_zeros_stay_zeros_and_may_be_normed_in_place() -> None:
    x = torch.zeros(2, 40)
    rms_norm(x, torch.ones(40), 1e-6, out=x)
    assert not x.any()


def test_no_rows_is_no_launch() -> None:
    out = torch.empty(0, 40)
    assert rms_norm(torch.empty(0, 40), torch.ones(40), 1e-6, out=out) is out
