"""Blocks of an aborted request are given to another one while the first one's KV is in flight."""

from __future__ import annotations

import random
from contextlib import closing

import pytest

from tests.conformance.conftest import UCX
from tests.unit.engine.tiny_llama import TinyLlama, random_prompt
from tests.unit.workers.worker_pair import WorkerPair

NUM_BLOCKS = 6
NUM_TOKENS = 6


@pytest.mark.parametrize(
    ("transport", "num_rounds"), [
        ("inproc", 100), ("shm", 150), ("tcp", 150), pytest.param("ucx", 100, marks=UCX.marks),
    ],
)  # fmt: skip
def test_the_next_request_sees_only_its_own_kv(
    tiny_llama: TinyLlama, transport: str, num_rounds: int
) -> None:
    with closing(
        WorkerPair(
            tiny_llama.engine(role="prefill", max_batched_tokens=24, kv_blocks=16),
            tiny_llama.engine(kv_blocks=NUM_BLOCKS),
            transport=transport,
        )
    ) as pair:
        abort_and_reuse(tiny_llama, pair, num_rounds)


def abort_and_reuse(tiny_llama: TinyLlama, pair: WorkerPair, num_rounds: int) -> None:
    choose = random.Random(num_rounds)
    turns = list(pair.turns.values())
    num_in_flight = 0
    for number in range(num_rounds):
        # Each needs most of the small pool, so the second one gets blocks of the first one.
        first = random_prompt(choose.randint(50, 80), seed=1000 + number)
        second = random_prompt(choose.randint(50, 80), seed=5000 + number)
        pair.submit(f"a{number}", first, NUM_TOKENS, salt=f"a{number}")
        for _ in range(choose.randint(5, 60)):
            choose.choice(turns)()
        num_in_flight += pair.receiver.num_open
        pair.abort(f"a{number}")
        pair.submit(f"b{number}", second, NUM_TOKENS, salt=f"b{number}")
        pair.run()
        assert pair.tokens(f"b{number}") == tiny_llama.greedy(second, NUM_TOKENS)
        pair.check_everything_is_free()
    assert num_in_flight > num_rounds / 4, "too few were aborted while a grant was open"
