"""Steps become as large as the worker can compute in time, and stay there."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine.scheduling.step_pace import StepPace

MAX_S = 0.25
MAX_TOKENS = 512
LEAST = 16


def affine(fixed_s: float, each_s: float) -> Callable[[int], float]:
    return lambda num_tokens: fixed_s + num_tokens * each_s


def warm(cost_s: Callable[[int], float]) -> StepPace:
    """As after warming up: a prompt and two decodes."""
    pace = StepPace(MAX_S, MAX_TOKENS)
    for num_tokens in (40, 1, 1):
        pace.observe(num_tokens, cost_s(num_tokens))
    return pace


def run(pace: StepPace, cost_s: Callable[[int], float], num_steps: int) -> list[float]:
    """Seconds of steps that prompts fill."""
    seconds = []
    for _ in range(num_steps):
        num_tokens = max(LEAST, pace.limit_tokens())
        seconds.append(cost_s(num_tokens))
        pace.observe(num_tokens, seconds[-1])
    return seconds


def test_before_anything_is_measured_steps_are_small() -> None:
    assert StepPace(MAX_S, MAX_TOKENS).limit_tokens() == 64
    assert StepPace(MAX_S, 20).limit_tokens() == 20


def test_without_a_bound_nothing_is_limited() -> None:
    pace = StepPace(0.0, MAX_TOKENS)
    assert pace.limit_tokens() == MAX_TOKENS
    pace.observe(512, 100.0)
    assert pace.limit_tokens() == MAX_TOKENS


@pytest.mark.parametrize("fixed_s", [0.001, 0.02, 0.1])
@pytest.mark.parametrize("each_s", [0.001, 0.003, 0.008])
def test_prompts_soon_fill_the_time_and_hardly_go_over_it(fixed_s: float, each_s: float) -> None:
    cost_s = affine(fixed_s, each_s)
    seconds = run(warm(cost_s), cost_s, 12)
    assert max(seconds) <= MAX_S * 1.05
    assert min(seconds[6:]) >= MAX_S * 0.9


def test_what_ends_in_time_is_not_cut() -> None:
    for fixed_s, each_s in ((0.1, 0.0002), (0.001, 0.0004), (0.0005, 1e-7)):
        cost_s = affine(fixed_s, each_s)
        pace = warm(cost_s)
        run(pace, cost_s, 15)
        assert pace.limit_tokens() == MAX_TOKENS


def test_where_no_prompt_fits_the_limit_is_still_a_token() -> None:
    pace = StepPace(MAX_S, MAX_TOKENS)
    for _ in range(20):
        pace.observe(1, 2.0)
    assert pace.limit_tokens() == 1


def test_decodes_alone_do_not_change_what_is_known_of_prompts() -> None:
    cost_s = affine(0.05, 0.002)
    pace = warm(cost_s)
    run(pace, cost_s, 20)
    before, noise = pace.limit_tokens(), random.Random(3)
    for _ in range(2000):
        pace.observe(4, cost_s(4) * noise.uniform(0.8, 1.2))
    assert 0.7 * before <= pace.limit_tokens() <= 1.3 * before


def test_one_interrupted_step_at_most_halves_the_next_and_is_soon_forgotten() -> None:
    cost_s = affine(0.01, 0.004)
    pace = warm(cost_s)
    run(pace, cost_s, 20)
    before = pace.limit_tokens()
    pace.observe(before, 60.0)
    assert 0.4 * before <= pace.limit_tokens() <= 0.6 * before
    run(pace, cost_s, 8)
    assert pace.limit_tokens() >= 0.9 * before


def test_a_machine_that_becomes_slower_is_followed_and_one_that_recovers_too() -> None:
    fast, slow = affine(0.005, 0.001), affine(0.02, 0.008)
    pace = warm(fast)
    run(pace, fast, 20)
    assert max(run(pace, slow, 10)[5:]) <= MAX_S * 1.1
    assert min(run(pace, fast, 30)[20:]) >= MAX_S * 0.9


def test_longer_contexts_make_chunks_smaller() -> None:
    pace, position, seconds = StepPace(MAX_S, MAX_TOKENS), 0, []
    while position < 8000:
        num_tokens = max(LEAST, pace.limit_tokens())
        seconds.append(0.02 + num_tokens * 0.002 * (1 + (position + num_tokens / 2) / 2000))
        pace.observe(num_tokens, seconds[-1])
        position += num_tokens
    assert max(seconds) <= MAX_S * 1.2
    assert sorted(seconds)[len(seconds) // 2] >= MAX_S * 0.9


def test_forgetting_starts_again() -> None:
    pace = warm(affine(0.0, 1.0))
    pace.forget()
    assert pace.limit_tokens() == 64
    pace.observe(40, 0.04)
    assert pace.limit_tokens() == 250
