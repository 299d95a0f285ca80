"""Penalties, bias, min_tokens and reported log-probabilities against the plain reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.sampler import sample
from engine.sequence import Sequence
from tests.unit.engine.sampler_reference import adjusted_logits
from tests.unit.engine.tiny_llama import new_sequence

VOCAB = 24


def random_logits(seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32) * 3


def history(number: int, **sampling: Any) -> Sequence:
    """A prompt of 6 tokens and 5 outputs with repeats."""
    rng = np.random.default_rng(number)
    sequence = new_sequence(rng.integers(0, VOCAB, 6).tolist(), 20, **sampling)
    sequence.token_ids += rng.integers(0, 8, 5).tolist()
    return sequence


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.8},
        {"presence_penalty": -2.0, "frequency_penalty": -1.0},
        {"logit_bias": ((3, 100.0), (5, -100.0), (7, 2.5))},
        {"min_tokens": 9, "stop_token_ids": tuple(range(12))},
        {"min_tokens": 5, "stop_token_ids": tuple(range(12))},
        {"min_tokens": 9},
        {
            "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2,
            "logit_bias": ((1, 4.0),), "min_tokens": 9, "stop_token_ids": (2, 3),
        },
    ],
    ids=str,
)  # fmt: skip
def test_greedy_follows_the_adjusted_logits(seed: int, sampling: dict[str, Any]) -> None:
    sequence, logits = history(seed, **sampling), random_logits(seed)
    row = torch.from_numpy(logits.copy())[None]
    (token,) = sample(row, [sequence])
    expected = adjusted_logits(logits, sequence)
    assert token.token_id == int(expected.argmax())
    np.testing.assert_allclose(row[0].numpy(), expected, rtol=1e-5, atol=1e-5)


def test_penalties_see_outputs_and_repetition_the_prompt_too() -> None:
    sequence = new_sequence([0, 1], 20, presence_penalty=1.0, repetition_penalty=2.0)
    sequence.token_ids.append(2)
    row = torch.full((1, 4), 8.0)
    sample(row, [sequence])
    assert row[0].tolist() == [4.0, 4.0, 3.0, 8.0]


def test_a_stop_token_is_masked_until_min_tokens_exist() -> None:
    logits = torch.zeros(1, 4)
    logits[0, 3] = 9.0
    sequence = new_sequence([0], 8, min_tokens=2, stop_token_ids=(3,))
    tokens = []
    while sequence.finish_reason is None:
        (token,) = sample(logits.clone(), [sequence])
        sequence.append(token.token_id)
        tokens.append(token.token_id)
    assert tokens == [0, 0, 3]
    assert sequence.finish_reason == "stop"


@pytest.mark.parametrize("num_logprobs", [0, 1, 5, VOCAB, VOCAB + 10])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_logprobs_are_those_of_the_models_own_logits(num_logprobs: int, temperature: float) -> None:
    logits = random_logits(1)
    sequence = history(
        1, num_logprobs=num_logprobs, temperature=temperature, repetition_penalty=1.9,
        logit_bias=((4, 50.0),), seed=3,
    )  # fmt: skip
    (token,) = sample(torch.from_numpy(logits.copy())[None], [sequence])
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()
    assert token.token_id == 4
    found = token.logprobs
    assert found is not None
    assert found.token_id == 4
    assert found.logprob == pytest.approx(expected[4], abs=1e-9)
    best = sorted(range(VOCAB), key=lambda i: (-expected[i], i))[:num_logprobs]
    assert [i for i, _ in found.top] == best
    assert [value for _, value in found.top] == pytest.approx(expected[best].tolist(), abs=1e-9)


def test_logprobs_of_masked_tokens_are_minus_infinity() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0]])
    (token,) = sample(logits, [new_sequence([0], num_logprobs=3)])
    assert token.logprobs is not None
    assert dict(token.logprobs.top)[1] == -np.inf
    assert token.logprobs.logprob == pytest.approx(np.log(0.5))


def test_rows_that_need_work_do_not_disturb_plain_greedy_ones() -> None:
    rows = torch.from_numpy(np.stack([random_logits(seed) for seed in range(4)]))
    sequences = [
        history(0), history(1, logit_bias=((0, 99.0),)), history(2), history(3, num_logprobs=2),
    ]  # fmt: skip
    expected = [int(row.argmax()) for row in rows]
    tokens = sample(rows.clone(), sequences)
    assert [token.token_id for token in tokens] == [expected[0], 0, expected[2], expected[3]]
    assert [token.logprobs is not None for token in tokens] == [False, False, False, True]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_chosen(temperature: float) -> None:
    allowed = (3, 11, 17)
    chosen = set()
    for seed in range(40):
        sequence = history(0, allowed_token_ids=allowed, temperature=temperature, seed=seed)
        row = torch.from_numpy(random_logits(seed))[None]
        best = max(allowed, key=lambda token_id: float(row[0, token_id]))
        (token,) = sample(row, [sequence])
        chosen.add(token.token_id)
        assert token.token_id in allowed
        assert temperature > 0 or token.token_id == best
    assert chosen == set(allowed)


def test_bad_words_are_never_completed() -> None:
    words = ((4,), (7, 9), (1, 2, 3))
    logits = torch.zeros(VOCAB)
    logits[4], logits[9], logits[3], logits[20] = 9.0, 8.0, 7.0, 6.0

    def best(prompt: list[int], outputs: list[int]) -> int:
        sequence = new_sequence(prompt, 20, bad_words=words)
        sequence.token_ids += outputs
        (token,) = sample(logits.clone()[None], [sequence])
        return token.token_id

    assert best([0], []) == 9
    assert best([0], [7]) == 3, "9 after 7 would complete a word"
    assert best([0], [7, 1]) == 9
    assert best([0], [7, 1, 2, 7]) == 3
    assert best([0], [9, 1, 2]) == 9, "3 is masked here, 9 is not"
    logits[9] = 0.0
    assert best([0], [1, 2]) == 20
    assert best([0, 1, 2], []) == 3, "a word counts in the output only"
    assert best([0, 1], [2]) == 3
