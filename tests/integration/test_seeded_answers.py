"""A seeded request has one answer, to the last bit, whatever is computed beside it.

Compared are both answers of ``n`` = 2 at temperature 1: their tokens, and the log-probability of
each, since a bit of the logits may change and still choose the same token. They must be those of an
engine that has the request to itself and computes its prompt in one piece. The cluster cuts it
(``--max-batched-tokens`` is less), and its pools are too small for the load.

The suite asks a few times. ``PDMESH_SEEDED_REPEATS=200 ./pdmesh test
tests/integration/test_seeded_answers.py -s`` asks 200 times with each kind of weights beside load,
40 times with preemptions and 10 times with a worker's death, and prints the counts.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import Any

import aiohttp
import pytest

from engine.backends.cpu.backend import CpuBackend
from engine.engine import Engine
from engine.sequence import Sequence
from gateway.generation.sampling import seed_of_sample
from mesh.config import Weights, WorkerConfig
from mesh.messages import SamplingParams
from tests.integration.conftest import CROWDED_STEP_TOKENS
from tests.integration.prompts import BLOCK_SIZE
from tests.integration.running_cluster import RunningCluster, stream
from tests.integration.test_worker_metrics import scrape

Sample = tuple[tuple[int, float], ...]
"""The tokens of one answer, each with its log-probability."""

_REPEATS = int(os.environ.get("PDMESH_SEEDED_REPEATS", "6"))
_NUM_CLIENTS = (0, 4, 9)
_NUM_SAMPLES = 2
_NUM_TOKENS = 48
_SEED = 20_240_229
_PROMPT = random.Random(5).choices(range(10, 40_000), k=5 * BLOCK_SIZE + 10)
_FIELDS: dict[str, Any] = {
    "prompt": _PROMPT,
    "n": _NUM_SAMPLES,
    "temperature": 1,
    "seed": _SEED,
    "max_tokens": _NUM_TOKENS,
    "ignore_eos": True,
    "logprobs": 0,
    "stream_options": {"include_usage": True},
}

pytestmark = [
    pytest.mark.parametrize(
        ("cluster", "weights"),
        [("fp32-crowded", "fp32"), ("int8-crowded", "int8"), ("int4-crowded", "int4")],
        indirect=["cluster"],
        scope="session",
    ),
    pytest.mark.timeout(600 + 30 * _REPEATS),
]


@cache
def _expected(weights: Weights) -> tuple[Sample, ...]:
    """What an engine answers that computes nothing else, one sample after the other."""
    config = WorkerConfig(
        role="decode", worker_id="alone", redis_url="redis://unused", weights=weights,
        kv_blocks=16, block_size=BLOCK_SIZE, max_model_len=16 * BLOCK_SIZE, max_step_ms=0.0,
    )  # fmt: skip
    engine = Engine(config, CpuBackend(weights, 2))
    return tuple(_alone(engine, sample) for sample in range(_NUM_SAMPLES))


def _alone(engine: Engine, sample: int) -> Sample:
    now_s = time.monotonic()
    sequence = Sequence(
        request_id="alone",
        transfer_id="alone",
        token_ids=list(_PROMPT),
        num_prompt_tokens=len(_PROMPT),
        sampling=SamplingParams(
            max_tokens=_NUM_TOKENS, seed=seed_of_sample(_SEED, sample), num_logprobs=0
        ),
        deadline_s=now_s + 1e6,
        arrival_s=now_s,
        cache_salt=str(sample),
    )
    engine.scheduler.add(sequence)
    tokens = []
    while sequence.finish_reason is None:
        for result in engine.step().results:
            assert result.token.logprobs is not None
            tokens.append((result.token.token_id, result.token.logprobs.logprob))
    engine.scheduler.finish(sequence)
    assert engine.num_forwards == (sample + 1) * _NUM_TOKENS, "the prompt was one step"
    return tuple(tokens)


class _Asked:
    """One asking of the seeded request."""

    def __init__(
        self, cluster: RunningCluster, session: aiohttp.ClientSession, **fields: Any
    ) -> None:
        self._events = stream(cluster, session, **{**_FIELDS, **fields})
        self._samples: list[list[tuple[int, float]]] = [[] for _ in range(_NUM_SAMPLES)]
        self.num_cached_tokens = 0

    async def read(self, *, until_tokens: int = 0) -> None:
        """Go on until both samples together have that many tokens; 0: until one of them ends."""
        async for event in self._events:
            if self._add(event) and not until_tokens:
                return
            if 0 < until_tokens <= sum(map(len, self._samples)):
                return

    async def finish(self) -> tuple[Sample, ...]:
        """Both samples, complete."""
        async for event in self._events:
            self._add(event)
        assert [len(sample) for sample in self._samples] == [_NUM_TOKENS] * _NUM_SAMPLES
        return tuple(map(tuple, self._samples))

    def _add(self, event: dict[str, Any]) -> bool:
        """Whether it is the end of a sample."""
        assert "error" not in event, event
        if event.get("usage"):
            self.num_cached_tokens = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        ends = False
        for choice in event["choices"]:
            values = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
            self._samples[choice["index"]] += zip(choice["token_ids"], values, strict=True)
            ends |= choice["finish_reason"] is not None
        return ends


async def _ask_other(
    cluster: RunningCluster, session: aiohttp.ClientSession, num_prompt: int, num_output: int
) -> None:
    fields = {
        "prompt": random.choices(range(10, 40_000), k=num_prompt),
        "temperature": 1,
        "seed": random.getrandbits(40),
        "max_tokens": num_output,
        "ignore_eos": True,
    }
    async with session.post(f"{cluster.url}/v1/completions", json=fields) as response:
        assert response.status == 200, await response.text()
        await response.read()


@asynccontextmanager
async def _load(
    cluster: RunningCluster, session: aiohttp.ClientSession, num_clients: int
) -> AsyncIterator[None]:
    """Clients that ask for one thing after the other; at the end all of them go away."""

    async def ask_on() -> None:
        while True:
            await _ask_other(cluster, session, random.randint(4, 80), random.randint(4, 32))

    clients = [asyncio.create_task(ask_on()) for _ in range(num_clients)]
    try:
        yield
        assert not any(client.done() for client in clients), "a client failed"
    finally:
        for client in clients:
            client.cancel()
        for client in clients:
            with suppress(asyncio.CancelledError):
                await client


def _endpoints(cluster: RunningCluster) -> dict[str, str]:
    workers = cluster.get("/debug/census")["workers"]
    return {worker["id"]: worker["http_endpoint"] for worker in workers}


def _decodes_alone(cluster: RunningCluster) -> str:
    """The one worker that decodes now."""
    census = cluster.census()
    [busy] = [name for name in census if name.startswith("decode") and census[name]["running"]]
    return busy


def _verify(answers: Counter[tuple[Sample, ...]], weights: Weights, what: str) -> None:
    print(f"{weights}: {answers.total()} times {what}: {len(answers)} distinct")
    assert set(answers) == {_expected(weights)}


async def test_beside_any_load(
    cluster: RunningCluster, session: aiohttp.ClientSession, weights: Weights
) -> None:
    """Prompts are cut where the others leave room, computed again or found in a cache."""
    cluster.wait_idle(300)
    prefill = _endpoints(cluster)["prefill-0"]
    answers: Counter[tuple[Sample, ...]] = Counter()
    for num_clients in _NUM_CLIENTS:
        async with _load(cluster, session, num_clients):
            for repeat in range(-(-_REPEATS // len(_NUM_CLIENTS))):
                is_fresh = repeat % 3 == (1 if num_clients else 2)
                before = scrape(prefill)["vllm:iteration_tokens_total_count"]
                salt = uuid.uuid4().hex if is_fresh else "kept"
                asked = _Asked(cluster, session, cache_salt=salt)
                answers[await asked.finish()] += 1
                if num_clients == 0:
                    num_steps = scrape(prefill)["vllm:iteration_tokens_total_count"] - before
                    is_cached = repeat > 0 and not is_fresh
                    assert (asked.num_cached_tokens > 0) == is_cached
                    num_left = len(_PROMPT) - asked.num_cached_tokens
                    assert num_steps == -(-num_left // CROWDED_STEP_TOKENS), "cut into chunks"
    _verify(answers, weights, "beside others")


async def test_after_preemption(
    cluster: RunningCluster, session: aiohttp.ClientSession, weights: Weights
) -> None:
    """The request is the least urgent of its worker: the first to give its blocks away."""
    answers: Counter[tuple[Sample, ...]] = Counter()
    num_preempted = num_repeats = max(2, _REPEATS // 5)
    for _ in range(num_repeats):
        cluster.wait_idle(300)
        asked = _Asked(cluster, session, priority=1)
        await asked.read(until_tokens=2)
        worker = _endpoints(cluster)[_decodes_alone(cluster)]
        before = scrape(worker)["vllm:num_preemptions_total"]
        others = [asyncio.create_task(_ask_other(cluster, session, 4, 40)) for _ in range(12)]
        await asked.read()
        # A sample has not ended: whoever was preempted so far, one of the two was the first.
        num_preempted -= scrape(worker)["vllm:num_preemptions_total"] == before
        answers[await asked.finish()] += 1
        await asyncio.gather(*others)
    _verify(answers, weights, f"with {num_preempted} preempted")
    assert num_preempted > 0


async def test_after_a_replay_on_another_worker(
    cluster: RunningCluster, session: aiohttp.ClientSession, weights: Weights
) -> None:
    """Prompt and tokens so far are computed as one prompt, elsewhere, beside others."""
    answers: Counter[tuple[Sample, ...]] = Counter()
    for _ in range(max(1, _REPEATS // 20)):
        cluster.wait_idle(300)
        asked = _Asked(cluster, session)
        await asked.read(until_tokens=random.randint(6, 60))
        os.kill(cluster.up.children()[_decodes_alone(cluster)], signal.SIGKILL)
        async with _load(cluster, session, 4):
            answers[await asked.finish()] += 1
    _verify(answers, weights, "with a death")
