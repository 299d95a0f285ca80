"""Fused row kernels against float64, below and above the size where threads take part."""

from __future__ import annotations

import math

import numba
import numpy as np
import numpy.typing as npt
import pytest
from torch import from_numpy as tensor

from engine.backends.cpu import elementwise
from engine.backends.cpu.elementwise import SERIAL_ELEMENTS
from engine.backends.cpu.intrinsics import exp_f32

SERIAL = [(1, 32), (2, 577), (33, 96), (SERIAL_ELEMENTS // 128, 128)]
PARALLEL = [(SERIAL_ELEMENTS // 128 + 1, 128), (SERIAL_ELEMENTS // 577 + 1, 577), (2049, 32)]
SHAPES = [*SERIAL, *PARALLEL]
Array = npt.NDArray[np.float32]


def random(*shape: int, seed: int, scale: float = 3.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def poisoned(*shape: int) -> Array:
    return np.full(shape, np.nan, np.float32)


@numba.njit
def exp_all(x: Array, out: Array) -> None:
    for i in range(len(x)):
        out[i] = exp_f32(x[i])


@pytest.mark.parametrize("limit", [87.0, 1.0, 1e-3])
def test_exp_is_accurate_over_its_whole_range(limit: float) -> None:
    x = np.linspace(-limit, limit, 200_001).astype(np.float32)
    found = poisoned(len(x))
    exp_all(x, found)
    exact = np.exp(x.astype(np.float64))
    assert (abs(found - exact) / exact).max() < 2e-7
    assert found[x == 0] == 1.0


def test_exp_saturates_beyond_its_range() -> None:
    x = np.array([-87.5, -1e4, -3e38, -math.inf, 87.5, 1e4, 3e38, math.inf], np.float32)
    found = poisoned(len(x))
    exp_all(x, found)
    np.testing.assert_allclose(found, np.exp([-87.0] * 4 + [87.0] * 4), rtol=2e-7)


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_rms_norm(rows: int, width: int) -> None:
    x, weight = random(rows, width, seed=1), random(width, seed=2)
    out = poisoned(rows, width)
    elementwise.rms_norm(tensor(x), tensor(weight), 1e-5, tensor(out))
    np.testing.assert_allclose(out, norm_reference(x, weight, 1e-5), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_add_rms_norm_adds_in_place_and_leaves_x(rows: int, width: int) -> None:
    x, residual = random(rows, width, seed=3), random(rows, width, seed=4)
    weight, out = random(width, seed=5), poisoned(rows, width)
    x_before, expected = x.copy(), x + residual
    elementwise.add_rms_norm(tensor(x), tensor(residual), tensor(weight), 1e-5, tensor(out))
    assert np.array_equal(residual, expected)
    assert np.array_equal(x, x_before)
    np.testing.assert_allclose(out, norm_reference(expected, weight, 1e-5), rtol=2e-6, atol=1e-6)


def test_rows_of_zeros_stay_zero() -> None:
    x, out = np.zeros((2, 32), np.float32), poisoned(2, 32)
    elementwise.rms_norm(tensor(x), tensor(random(32, seed=6)), 1e-6, tensor(out))
    assert not out.any()


def norm_reference(x: Array, weight: Array, eps: float) -> npt.NDArray[np.float64]:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + eps) * weight


@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 40.0])
def test_gated_activations(rows: int, width: int, gelu: bool, scale: float) -> None:
    gate_up, out = random(rows, 2 * width, seed=7, scale=scale), poisoned(rows, width)
    elementwise.act_mul(tensor(gate_up), gelu, tensor(out))
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    if gelu:
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        activated = 0.5 * gate * (1 + np.tanh(inner))
    else:
        activated = gate * np.exp(-np.logaddexp(0, -gate))
    tolerance = 3e-6 * (abs(gate) * abs(up)).max()
    np.testing.assert_allclose(out, activated * up, rtol=3e-6, atol=tolerance * 1e-2)


@pytest.mark.parametrize("gelu", [False, True])
def test_gates_beyond_the_range_of_exp_saturate(gelu: bool) -> None:
    gate_up = np.array([[-1e4, -200.0, 0.0, 200.0, 1e4, 1, 1, 1, 1, 1]], np.float32)
    out = poisoned(1, 5)
    elementwise.act_mul(tensor(gate_up), gelu, tensor(out))
    np.testing.assert_allclose(out[0], [0, 0, 0, 200, 1e4], rtol=1e-6, atol=1e-30)
