"""Planning ahead of the device changes no answer, and leaves no block behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.engine import Engine, StepOutcome
from engine.sequence import Sequence
from engine.warm_up import warm_up
from tests.unit.engine.late_runner import LateRunner
from tests.unit.engine.tiny_llama import (
    TinyLlama,
    finish_ended,
    generate,
    new_sequence,
    random_prompt,
)

HOST_SAMPLING: list[dict[str, Any]] = [
    {"num_logprobs": 1},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "temperature": 0.8, "seed": 5},
    {"bad_words": ((3, 4), (7,))},
    {"min_tokens": 3, "stop_token_ids": tuple(range(48))},
]


def test_a_step_is_launched_while_the_one_before_computes(tiny_llama: TinyLlama) -> None:
    engine = tiny_llama.engine(overlap=True)
    prompt = random_prompt(20, seed=1)
    sequence = new_sequence(prompt, 4)
    engine.scheduler.add(sequence)
    first = engine.step()
    assert (first.results, first.has_launched, first.has_worked) == ([], True, True)
    assert sequence.num_output_tokens == 0
    second = engine.step()
    assert [result.sequence for result in second.results] == [sequence]
    assert second.num_tokens == 20
    assert sequence.num_pending_tokens == 1
    assert _most_launched(engine) == 2
    finish_ended(engine)
    assert sequence.token_ids[20:] == tiny_llama.greedy(prompt, 4)


def test_no_token_is_computed_past_the_known_end(tiny_llama: TinyLlama) -> None:
    engine = tiny_llama.engine(overlap=True)
    engine.scheduler.add(new_sequence(random_prompt(20, seed=2), 4))
    outcomes = _run(engine)
    assert sum(outcome.num_tokens for outcome in outcomes) == 20 + 3


def test_a_stop_token_ends_the_answer_and_the_step_after_it_is_dropped(
    tiny_llama: TinyLlama,
) -> None:
    prompt = random_prompt(21, seed=3)
    answer = tiny_llama.greedy(prompt, 12)
    stop = answer[5]
    engine = tiny_llama.engine(overlap=True)
    sequence = new_sequence(prompt, 12, stop_token_ids=(stop,))
    engine.scheduler.add(sequence)
    outcomes = _run(engine)
    assert sequence.finish_reason == "stop"
    assert sequence.token_ids[21:] == answer[: answer.index(stop) + 1]
    assert sum(len(outcome.results) for outcome in outcomes) == sequence.num_output_tokens
    computed = sum(outcome.num_tokens for outcome in outcomes)
    assert computed == 21 + sequence.num_output_tokens, "one token more than was wanted"


def test_blocks_of_an_aborted_sequence_are_free_only_when_nothing_writes_them(
    tiny_llama: TinyLlama,
) -> None:
    engine = tiny_llama.engine(overlap=True)
    pool = engine.scheduler.pool
    sequence = new_sequence(random_prompt(40, seed=4), 12)
    engine.scheduler.add(sequence)
    engine.step()
    held = pool.num_blocks - pool.num_free
    engine.scheduler.finish(sequence)
    assert pool.num_blocks - pool.num_free == held == len(engine.scheduler.launched.retired)
    outcome = engine.step()
    assert (outcome.results, outcome.computed, outcome.num_tokens) == ([], [], 40)
    assert pool.num_free == pool.num_blocks
    assert not engine.scheduler.has_work


@pytest.mark.parametrize("sampling", HOST_SAMPLING)
def test_what_needs_the_host_is_not_run_ahead_of(
    tiny_llama: TinyLlama, sampling: dict[str, Any]
) -> None:
    def sequences() -> list[Sequence]:
        return [
            new_sequence(random_prompt(18, seed=5), 9, **sampling),
            new_sequence(random_prompt(9, seed=6), 7),
            new_sequence(random_prompt(30, seed=7), 8, temperature=1.2, seed=11),
        ]

    engine = tiny_llama.engine(overlap=True)
    assert generate(engine, *sequences()) == generate(tiny_llama.engine(), *sequences())
    alone = tiny_llama.engine(overlap=True)
    generate(alone, sequences()[0])
    assert _most_launched(alone) == 1 + (sampling.get("min_tokens") is not None)


def test_layers_and_outcomes_are_told_of_with_the_number_of_their_step(
    tiny_llama: TinyLlama,
) -> None:
    engine = tiny_llama.engine(overlap=True, kv_layer_groups=2)
    engine.scheduler.add(new_sequence(random_prompt(20, seed=4), 3))
    told: list[tuple[int, int]] = []
    engine.step(lambda chunks, group: told.append((engine.num_steps_done, group)))
    assert (engine.num_forwards, engine.num_steps_done, told) == (1, 0, [])
    engine.step()
    assert (engine.num_forwards, engine.num_steps_done, told) == (2, 1, [(1, 0), (1, 1)])
    finish_ended(engine)
    assert engine.num_forwards == engine.num_steps_done == 3


def test_warm_up_leaves_no_trace(tiny_llama: TinyLlama) -> None:
    engine = tiny_llama.engine(overlap=True, kv_blocks=8)
    warm_up(engine)
    pool = engine.scheduler.pool
    assert pool.num_free == pool.num_blocks
    assert not engine.scheduler.has_work


@pytest.mark.parametrize("seed", range(12))
def test_random_loads_answer_as_without_overlap(tiny_llama: TinyLlama, seed: int) -> None:
    answers = []
    for overlap in (False, True):
        rng = np.random.default_rng(seed)
        engine = tiny_llama.engine(
            overlap=overlap,
            kv_blocks=int(rng.integers(4, 10)),
            max_batched_tokens=int(rng.integers(8, 40)),
            max_num_seqs=int(rng.integers(2, 6)),
        )
        answers.append(_random_load(engine, rng, tiny_llama))
        if overlap:
            assert _most_launched(engine) == 2
    assert answers[0] == answers[1]


def _random_load(
    engine: Engine, rng: np.random.Generator, tiny_llama: TinyLlama
) -> dict[int, list[int]]:
    """Answers of all that was not aborted, by arrival."""
    pool = engine.scheduler.pool
    sequences: list[Sequence] = []
    for index in range(10):
        prompt = random_prompt(int(rng.integers(1, 40)), seed=100 + index % 4)
        sampling: dict[str, Any] = {}
        match int(rng.integers(0, 5)):
            case 0:
                sampling = {"temperature": 0.9, "seed": index, "top_k": 20}
            case 1:
                sampling = {"stop_token_ids": (tiny_llama.greedy(prompt, 12)[4],)}
            case 2 if index % 3 == 0:
                sampling = HOST_SAMPLING[index % len(HOST_SAMPLING)]
        count = int(rng.integers(1, 24))
        sequences.append(new_sequence(prompt, count, arrival_s=float(index), **sampling))
    waits = rng.integers(0, 3, len(sequences))
    aborted = set(rng.choice(len(sequences), 2, replace=False).tolist())
    aborts = {int(index): int(rng.integers(1, 8)) for index in sorted(aborted)}
    for index, sequence in enumerate(sequences):
        engine.scheduler.add(sequence)
        for _ in range(int(waits[index])):
            _step(engine)
        for other, after in aborts.items():
            is_time = index == min(other + after, len(sequences) - 1)
            if is_time and sequences[other] in engine.scheduler.live_sequences():
                engine.scheduler.finish(sequences[other])
    _run(engine)
    assert pool.num_free == pool.num_blocks
    return {
        index: sequence.token_ids[sequence.num_prompt_tokens :]
        for index, sequence in enumerate(sequences)
        if index not in aborted
    }


def _step(engine: Engine) -> StepOutcome:
    outcome = engine.step()
    for result in outcome.results:
        if result.sequence.finish_reason is not None:
            engine.scheduler.finish(result.sequence)
    engine.scheduler.pool.check_integrity()
    return outcome


def _run(engine: Engine) -> list[StepOutcome]:
    outcomes = []
    while engine.scheduler.has_work:
        outcomes.append(_step(engine))
        assert len(outcomes) < 2000, "sequences did not end"
    return outcomes


def _most_launched(engine: Engine) -> int:
    assert isinstance(engine.runner, LateRunner)
    return engine.runner.most_launched
