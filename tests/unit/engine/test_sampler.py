"""Drawn tokens follow the reference's distribution, and depend on seed and index alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.sampler import sample, uniform
from engine.sequence import Sequence
from tests.unit.engine.sampler_reference import philox_uniform, probabilities
from tests.unit.engine.tiny_llama import new_sequence

NUM_DRAWS = 6000
LOGITS = np.random.default_rng(1).standard_normal(40).astype(np.float32) * 2


def draw(logits: npt.NDArray[np.float32], count: int, **sampling: Any) -> list[int]:
    """Tokens of ``count`` seeds at output index 0."""
    rows = torch.from_numpy(np.tile(logits, (count, 1)))
    sequences = [
        new_sequence([0], **{"temperature": 1.0, "seed": seed, **sampling}) for seed in range(count)
    ]
    return [token.token_id for token in sample(rows, sequences)]


def chi_square_limit(freedom: int) -> float:
    """Exceeded by chance once in about 10^5 (Wilson & Hilferty's approximation, 4.26 sigmas)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.26 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_k": 1000},
        {"top_p": 0.7},
        {"top_p": 0.95, "temperature": 1.7},
        {"min_p": 0.1},
        {"top_k": 12, "top_p": 0.8, "min_p": 0.05, "temperature": 1.3},
    ],
    ids=str,
)
def test_draws_follow_the_reference_distribution(sampling: dict[str, Any]) -> None:
    expected = probabilities(LOGITS, new_sequence([0], **{"temperature": 1.0, **sampling}).sampling)
    observed = np.bincount(draw(LOGITS, NUM_DRAWS, **sampling), minlength=len(LOGITS))
    assert not observed[expected == 0].any()
    frequent = expected * NUM_DRAWS >= 5
    bins = [*expected[frequent], expected[~frequent].sum()]
    counts = [*observed[frequent], observed[~frequent].sum()]
    statistic = sum(
        (count - share * NUM_DRAWS) ** 2 / (share * NUM_DRAWS)
        for count, share in zip(counts, bins, strict=True)
        if share > 0
    )
    assert statistic < chi_square_limit(max(1, len(bins) - 1))


@pytest.mark.parametrize("seed", range(20))
def test_each_draw_inverts_the_references_cumulative_distribution(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(3000) * rng.uniform(0.1, 5)).astype(np.float32)
    options = {
        "temperature": float(rng.uniform(0.2, 2)),
        "top_k": int(rng.choice([0, 1, 7, 500, 5000])),
        "top_p": float(rng.choice([1.0, 0.99, 0.5, 1e-6])),
        "min_p": float(rng.choice([0.0, 0.01, 1.0])),
    }
    sequence = new_sequence([0], **options, seed=seed)
    cumulative = np.cumsum(probabilities(logits, sequence.sampling))
    for index in range(20):
        sequence.token_ids = [0] * (1 + index)
        (token,) = sample(torch.from_numpy(logits.copy())[None], [sequence])
        u = uniform(seed, index)
        low = cumulative[token.token_id - 1] if token.token_id else 0.0
        assert low - 1e-9 <= u <= cumulative[token.token_id] + 1e-9
        assert cumulative[token.token_id] > low


def test_a_draw_depends_on_seed_and_index_alone() -> None:
    rows = torch.from_numpy(np.random.default_rng(2).standard_normal((3, 40)).astype(np.float32))

    def continued(num_outputs: int, seed: int) -> Sequence:
        sequence = new_sequence([1] * 5, 50, temperature=1.0, seed=seed)
        sequence.token_ids += [2] * num_outputs
        return sequence

    sequences = [continued(3, seed=8), continued(0, seed=9), continued(7, seed=8)]
    together = [token.token_id for token in sample(rows.clone(), sequences)]
    for index in (2, 0, 1):
        alone = sample(rows[index : index + 1].clone(), [sequences[index]])
        assert alone[0].token_id == together[index]
    numbers = {uniform(seed, index) for seed in range(30) for index in range(30)}
    assert len(numbers) == 900
    assert all(0 <= number < 1 for number in numbers)


@pytest.mark.parametrize("seed", [0, 1, 1234, (1 << 63) - 1, (1 << 64) - 1, -1])
@pytest.mark.parametrize("index", [0, 1, 500, 1 << 20])
def test_the_numbers_are_philox_so_any_version_can_go_on_with_them(seed: int, index: int) -> None:
    assert uniform(seed, index) == philox_uniform(seed, index)


@pytest.mark.parametrize("options", [{}, {"num_logprobs": 0}, {"logit_bias": ((0, 1.0),)}])
def test_greedy_takes_the_first_of_equal_tokens(options: dict[str, Any]) -> None:
    logits = np.zeros(5000, np.float32)
    logits[[37, 38, 4000]] = 5.0
    (token,) = sample(torch.from_numpy(logits)[None], [new_sequence([0], **options)])
    assert token.token_id == 37


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert set(draw(LOGITS, 20, temperature=temperature)) == {int(LOGITS.argmax())}


@pytest.mark.parametrize(
    "sampling", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_p": 1e-9}, {"min_p": 1.0}]
)
def test_all_mass_on_one_token(sampling: dict[str, Any]) -> None:
    logits = np.full(40, -np.inf, np.float32)
    logits[17] = 3.0
    assert set(draw(logits, 20, **sampling)) == {17}


@pytest.mark.parametrize("sampling", [{}, {"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_masked_tokens_are_never_drawn(sampling: dict[str, Any]) -> None:
    logits = np.zeros(40, np.float32)
    logits[::2] = -np.inf
    assert all(token % 2 for token in draw(logits, 200, **sampling))


@pytest.mark.parametrize(("u", "token_id"), [(0.0, 2), (0.5, 4), (1 - 2.0**-53, 6)])
def test_the_ends_of_the_unit_interval_fall_on_tokens_that_can_be_drawn(
    u: float, token_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.sampler.uniform", lambda seed, index: u)
    logits = np.full(9, -np.inf, np.float32)
    logits[[2, 4, 6]] = [1.0, 1.5, 1.0]
    assert draw(logits, 1) == [token_id]
    logits[[4, 6]] = -np.inf
    assert draw(logits, 1) == [2]


def test_equal_logits_are_all_within_reach() -> None:
    assert set(draw(np.zeros(8, np.float32), 400)) == set(range(8))


def test_a_nucleus_wider_than_the_first_selection() -> None:
    logits = np.random.default_rng(3).standard_normal(5000).astype(np.float32) * 0.01
    expected = probabilities(logits, new_sequence([0], temperature=1.0, top_p=0.5).sampling)
    assert np.count_nonzero(expected) > 64 * 8
    assert all(expected[token] > 0 for token in draw(logits, 300, top_p=0.5))
