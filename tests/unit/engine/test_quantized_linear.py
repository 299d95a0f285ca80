"""Products with quantised weights against the exact value of what the format stores."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.backends.cpu.elementwise import SERIAL_ELEMENTS
from engine.backends.cpu.quantized_linear import QuantizedEmbedding, QuantizedLinear, pack
from engine.backends.cpu.workspace import Workspace
from tests.unit.engine.quantized_format import dequantised, quantised_rows, random_matrix

BITS = [8, 4]
SIZES = [(16, 32), (1, 64), (37, 64), (100, 576)]  # (N, K): N is rarely a multiple of 16
MAX_ROWS = 40


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
def test_every_row_count_gives_the_formats_exact_product(
    bits: int, out_features: int, in_features: int
) -> None:
    linear = QuantizedLinear(
        random_matrix(out_features, in_features, seed=1), None, bits, Workspace()
    )
    weight = dequantised(linear.packed, bits)[:out_features]
    x = random_matrix(MAX_ROWS, in_features, seed=2)
    codes, scales = quantised_rows(x)
    exact = (codes * scales) @ weight.T
    # Float additions: two per group, each off by at most half a unit in the last place.
    bound = (abs(codes * scales) @ abs(weight).T) * 2.0**-23 * (in_features // 32 + 2)
    for rows in range(1, MAX_ROWS + 1):
        found = linear(x[:rows]).numpy()
        assert found.shape == (rows, out_features)
        assert (abs(found - exact[:rows]) <= bound[:rows]).all()


@pytest.mark.parametrize("bits", BITS)
def test_a_row_is_the_same_bits_in_every_batch(bits: int) -> None:
    linear = QuantizedLinear(random_matrix(37, 576, seed=3), None, bits, Workspace())
    x = random_matrix(MAX_ROWS, 576, seed=4)
    alone = torch.cat([linear(x[row : row + 1]) for row in range(MAX_ROWS)])
    for rows in range(1, MAX_ROWS + 1):
        assert torch.equal(linear(x[:rows]), alone[:rows])
    order = torch.from_numpy(np.random.default_rng(5).permutation(MAX_ROWS))
    assert torch.equal(linear(x[order]), alone[order])


def test_threads_that_share_the_quantising_change_nothing() -> None:
    linear = QuantizedLinear(random_matrix(16, 576, seed=6), None, 8, Workspace())
    rows = SERIAL_ELEMENTS // 576 + 3
    x = random_matrix(rows, 576, seed=7)
    halves = torch.cat([linear(x[: rows // 2]), linear(x[rows // 2 :])])
    assert torch.equal(linear(x), halves)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("out_features", [16, 37])
def test_the_bias_is_added_to_every_row(bits: int, out_features: int) -> None:
    weight, bias = random_matrix(out_features, 64, seed=8), random_matrix(1, 64, seed=9)[0]
    x = random_matrix(5, 64, seed=10)
    bias = bias[:out_features]
    plain, biased = (
        QuantizedLinear(weight, None, bits, Workspace())(x),
        QuantizedLinear(weight, bias, bits, Workspace())(x),
    )
    assert torch.equal(biased, plain + bias)


@pytest.mark.parametrize(("bits", "relative"), [(8, 0.02), (4, 0.2)])
def test_the_product_is_close_to_that_of_the_unquantised_weights(
    bits: int, relative: float
) -> None:
    weight, x = random_matrix(64, 576, seed=11), random_matrix(8, 576, seed=12)
    exact = x.double() @ weight.double().T
    found = QuantizedLinear(weight, None, bits, Workspace())(x).double()
    assert (found - exact).norm() / exact.norm() < relative


def test_activations_are_rounded_to_the_nearest_code_of_their_group() -> None:
    x = random_matrix(20, 96, seed=13)
    codes, scales = quantised_rows(x)
    groups = x.double().numpy().reshape(20, 3, 32)
    largest = abs(groups).max(axis=2).repeat(32, axis=1)
    np.testing.assert_allclose(scales, largest / 127, rtol=1e-6)
    assert (abs(codes * scales - x.double().numpy()) <= scales * 0.50001).all()
    assert (abs(codes.reshape(20, 3, 32)).max(axis=2) == 127).all()


@pytest.mark.parametrize("value", [0.0, 1e-38, -1e-30, 3e-20, -1e10, 1e30])
def test_activations_of_any_magnitude(value: float) -> None:
    linear = QuantizedLinear(torch.eye(32), None, 8, Workspace())
    x = torch.zeros(1, 32)
    x[0, 3] = value
    found = linear(x)[0].double().numpy()
    expected = x[0].double().numpy()
    assert (abs(found - expected) <= abs(value) * 0.01 + 1e-30).all()


@pytest.mark.parametrize("token_ids", [[0], [36, 0, 17, 16, 15, 0], []])
def test_embedding_rows_are_the_dequantised_rows(token_ids: list[int]) -> None:
    table = random_matrix(37, 64, seed=14)
    packed = pack(table, 8)
    embedding = QuantizedEmbedding(packed, 64, shared=False)
    found = embedding(torch.tensor(token_ids, dtype=torch.int64)).numpy()
    expected = dequantised(packed, 8)[token_ids]
    assert found.shape == (len(token_ids), 64)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", BITS)
def test_no_rows_give_no_rows(bits: int) -> None:
    linear = QuantizedLinear(random_matrix(16, 32, seed=15), None, bits, Workspace())
    assert linear(torch.empty(0, 32)).shape == (0, 16)
