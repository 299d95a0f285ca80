"""Quantising weights: bounded errors, and groups at the edges of what 16-bit scales can hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.backends.cpu.quantized_linear import pack
from mesh.errors import ConfigError
from tests.unit.engine.quantized_format import Wide, dequantised, random_matrix, unpack

BITS = [8, 4]
FP16_MAX = 65504.0
FP16_ROUNDING = 2.0**-11
FP16_SUBNORMAL = 2.0**-25
"""Half of the smallest float16: the error of rounding anything near zero to one."""


def errors_and_bounds(weight: torch.Tensor, bits: int) -> tuple[Wide, Wide]:
    """Of every weight: half a step, and the rounding of the group's scale and minimum."""
    packed = pack(weight, bits)
    found = dequantised(packed, bits)[: len(weight)]
    groups = weight.double().numpy().reshape(len(weight), -1, 32)
    low, high = groups.min(axis=2), groups.max(axis=2)
    levels = 2**bits - 1
    step = (high - low) / levels
    bound = (
        step * (0.5 + FP16_ROUNDING)
        + (high - low) * FP16_ROUNDING + levels * FP16_SUBNORMAL
        + abs(low) * FP16_ROUNDING + FP16_SUBNORMAL
    )  # fmt: skip
    return abs(found - weight.double().numpy()), bound.repeat(32, axis=1)


def group_of(*values: float) -> torch.Tensor:
    """One group that begins with these values and repeats the last."""
    return torch.tensor([[*values, *[values[-1]] * (32 - len(values))]])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("magnitude", [1e-7, 1e-5, 1e-3, 1.0, 300.0])
def test_the_error_is_bounded_by_half_a_step_and_the_scales_rounding(
    bits: int, magnitude: float
) -> None:
    weight = random_matrix(37, 96, seed=1) * magnitude
    errors, bounds = errors_and_bounds(weight, bits)
    assert (errors <= bounds).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("offset", [0.0, 0.3, -5.0])
def test_each_weight_takes_the_nearest_value_that_its_group_can_hold(
    bits: int, offset: float
) -> None:
    weight = random_matrix(16, 64, seed=6) * 0.1 + offset
    codes, scales, minima = unpack(pack(weight, bits), bits)
    exact = weight.double().numpy()
    nearest = np.clip(np.rint((exact - minima) / scales), 0, 2**bits - 1)
    found = abs(codes * scales + minima - exact)
    assert (found <= abs(nearest * scales + minima - exact) + scales * 1e-3).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("offset", [-5.0, 5.0, 1000.0])
def test_groups_far_from_zero(bits: int, offset: float) -> None:
    errors, bounds = errors_and_bounds(random_matrix(5, 64, seed=2) * 0.01 + offset, bits)
    assert (errors <= bounds).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -2.5, 2.0**-24, -FP16_MAX])
def test_equal_weights_that_float16_holds_are_exact(bits: int, value: float) -> None:
    assert (dequantised(pack(group_of(value), bits), bits)[0] == value).all()


@pytest.mark.parametrize("bits", BITS)
def test_a_huge_outlier_costs_precision_in_its_own_group_only(bits: int) -> None:
    weight = random_matrix(1, 96, seed=3)
    weight[0, 40] = 6e4
    errors, bounds = errors_and_bounds(weight, bits)
    assert (errors <= bounds).all()
    usual = errors_and_bounds(random_matrix(1, 96, seed=3), bits)[0]
    assert np.array_equal(errors[:, :32], usual[:, :32])
    assert np.array_equal(errors[:, 64:], usual[:, 64:])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("spread", [1e-9, 1e-7, 3e-6, 1e-4])
def test_spreads_whose_scale_is_subnormal_or_vanishes(bits: int, spread: float) -> None:
    weight = group_of(*(spread * math.sin(i) for i in range(32)))
    errors, bounds = errors_and_bounds(weight, bits)
    assert np.isfinite(errors).all()
    assert (errors <= bounds).all()


@pytest.mark.parametrize("bits", BITS)
def test_the_whole_range_of_float16_is_usable(bits: int) -> None:
    errors, bounds = errors_and_bounds(group_of(-FP16_MAX, FP16_MAX, 0.0), bits)
    assert (errors <= bounds).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("values", [(-7e4, 0.0), (7e4, 7e4), (math.nan, 0.0), (math.inf, 0.0)])
def test_weights_that_16_bit_scales_cannot_hold_are_refused(
    bits: int, values: tuple[float, ...]
) -> None:
    with pytest.raises(ConfigError, match="65504"):
        pack(group_of(*values), bits)


@pytest.mark.parametrize("bits", BITS)
def test_all_codes_are_used_and_rows_beyond_the_last_are_zero(bits: int) -> None:
    codes, scales, minima = unpack(pack(random_matrix(17, 32, seed=4), bits), bits)
    assert (codes[:17].min(), codes[:17].max()) == (0, 2**bits - 1)
    assert len(codes) == 32
    assert not scales[17:].any()
    assert not minima[17:].any()


@pytest.mark.parametrize("bits", BITS)
def test_packing_leaves_the_weights_alone(bits: int) -> None:
    weight = random_matrix(16, 64, seed=5)
    before = weight.clone()
    pack(weight, bits)
    assert torch.equal(weight, before)


def test_a_width_of_partial_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiples of 32"):
        pack(torch.zeros(16, 48), 8)
