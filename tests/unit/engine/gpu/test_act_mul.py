"""Gated activations: widths past a block, types, strides, extreme gates."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from engine.backends.gpu.kernels.act_mul import act_mul, reference
from engine.model_config import HiddenAct

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
ACTIVATIONS: tuple[HiddenAct, ...] = get_args(HiddenAct)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 300), (2, 1024), (4, 1100)])
def test_products(activation: HiddenAct, dtype: torch.dtype, num_rows: int, width: int) -> None:
    wide = torch.full((num_rows, 2 * width + 24), float("nan"), dtype=dtype)
    gate_up = wide[:, 8 : 8 + 2 * width]
    gate_up.copy_(torch.randn(num_rows, 2 * width) * 4)
    out = torch.full((num_rows, width + 8), float("nan"), dtype=dtype)[:, :width]
    assert act_mul(gate_up, activation, out=out) is out
    expected = reference(gate_up.to(torch.float64), activation)
    limit = ROUNDING[dtype] * expected.abs() + 2e-6
    assert bool(((out.to(torch.float64) - expected).abs() <= limit).all())  # NaN fails


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_far_from_zero_saturate(activation: HiddenAct) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, -200.0, 200.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    out = torch.full((1, 5), float("nan"))
    act_mul(gate_up, activation, out=out)
    assert out[0].tolist() == pytest.approx([0.0, 1e4, 0.0, 200.0, 0.0], abs=1e-30)


def test_no_rows_is_no_launch() -> None:
    out = torch.empty(0, 4)
    assert act_mul(torch.empty(0, 8), "silu", out=out) is out
