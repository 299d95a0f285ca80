"""Samples of one prompt wait for the first one's KV, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.sequence import SequenceState
from tests.unit.engine.tiny_llama import TinyLlama, generate, new_sequence, random_prompt
from tests.unit.workers.worker_pair import WorkerPair

PROMPT = random_prompt(40, seed=61)
NUM_CACHED = 32
"""Whole blocks of the prompt."""


@pytest.fixture
def pair(tiny_llama: TinyLlama) -> WorkerPair:
    """The first sample waits for its KV, two siblings wait for the first one."""
    pair = WorkerPair(tiny_llama.engine(role="prefill"), tiny_llama.engine())
    pair.submit("first", PROMPT, 6)
    for seed in (1, 2):
        pair.submit(f"s{seed}", PROMPT, 6, after="first", temperature=1.2, seed=seed)
    pair.d_step()
    (first,) = pair.engines[1].scheduler.live_sequences()
    assert first.state is SequenceState.WAITING_FOR_KV
    return pair


def check_answer(tiny_llama: TinyLlama, pair: WorkerPair, seed: int) -> None:
    sequence = new_sequence(PROMPT, 6, temperature=1.2, seed=seed)
    assert pair.tokens(f"s{seed}") == generate(tiny_llama.engine(), sequence)[0]


def check_all_over(pair: WorkerPair) -> None:
    pair.check_everything_is_free()
    assert not pair.d_loop._siblings
    assert not pair.d_loop._quarantine


def test_held_siblings_are_counted_as_waiting(pair: WorkerPair) -> None:
    assert pair.d_loop.snapshot.waiting == 3


def test_siblings_start_with_the_first_ones_kv(tiny_llama: TinyLlama, pair: WorkerPair) -> None:
    while len(pair.outputs.get("first", [])) < 3:
        for turn in pair.turns.values():
            turn()
    assert pair.tokens("s1"), "a sibling waited for the first one's whole answer"
    pair.run()
    assert pair.tokens("first") == tiny_llama.greedy(PROMPT, 6)
    for seed in (1, 2):
        check_answer(tiny_llama, pair, seed)
        assert pair.outputs[f"s{seed}"][0].num_cached_tokens == NUM_CACHED
    check_all_over(pair)


def lose_prefill(pair: WorkerPair) -> None:
    for turn in pair.turns.values():
        turn()
    pair.receiver.on_peer_down("p")


ENDINGS: dict[str, Callable[[WorkerPair], None]] = {
    "aborted": lambda pair: pair.abort("first"),
    "aborted here only": lambda pair: pair.abort("first", at_p=False),
    "transfer lost": lose_prefill,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_siblings_start_without_the_first(
    tiny_llama: TinyLlama, pair: WorkerPair, ending: str
) -> None:
    ENDINGS[ending](pair)
    pair.run()
    for seed in (1, 2):
        check_answer(tiny_llama, pair, seed)
    assert "s1" not in pair.failures
    assert "s2" not in pair.failures
    check_all_over(pair)


def test_siblings_start_when_the_first_ends_at_its_first_token(tiny_llama: TinyLlama) -> None:
    pair = WorkerPair(tiny_llama.engine(role="prefill"), tiny_llama.engine())
    pair.submit("first", PROMPT, 1)
    pair.submit("s1", PROMPT, 6, after="first", temperature=1.2, seed=1)
    pair.run()
    assert pair.tokens("first") == tiny_llama.greedy(PROMPT, 1)
    check_answer(tiny_llama, pair, 1)
    check_all_over(pair)


@pytest.mark.parametrize("after", ["never heard of", "first"])
def test_a_sibling_of_one_that_is_gone_starts_at_once(tiny_llama: TinyLlama, after: str) -> None:
    pair = WorkerPair(tiny_llama.engine(role="prefill"), tiny_llama.engine())
    pair.submit("first", PROMPT, 2)
    pair.run()
    pair.submit("s1", PROMPT, 6, after=after, temperature=1.2, seed=1)
    pair.run()
    check_answer(tiny_llama, pair, 1)
    assert pair.outputs["s1"][0].num_cached_tokens == NUM_CACHED
    check_all_over(pair)


def test_a_held_sibling_can_be_aborted(tiny_llama: TinyLlama, pair: WorkerPair) -> None:
    pair.abort("s1")
    pair.run()
    assert pair.tokens("s1") == []
    assert "s1" not in pair.failures
    check_answer(tiny_llama, pair, 2)
    check_all_over(pair)


def test_held_siblings_leave_with_their_gateway(pair: WorkerPair) -> None:
    pair.lose_gateway()
    pair.run()
    assert pair.tokens("s1") == pair.tokens("s2") == []
    check_all_over(pair)


def test_another_salt_finds_none_of_the_first_ones_kv(tiny_llama: TinyLlama) -> None:
    pair = WorkerPair(tiny_llama.engine(role="prefill"), tiny_llama.engine())
    pair.submit("first", PROMPT, 6, salt="a")
    pair.submit("s1", PROMPT, 6, after="first", salt="b", temperature=1.2, seed=1)
    pair.run()
    check_answer(tiny_llama, pair, 1)
    assert pair.outputs["s1"][0].num_cached_tokens == 0
    check_all_over(pair)
