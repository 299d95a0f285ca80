"""A cluster where every twentieth transfer step goes wrong on purpose: clients notice time only."""

from __future__ import annotations

import asyncio

import aiohttp

from engine.backends.cpu.backend import CpuBackend
from engine.engine import Engine
from mesh.config import WorkerConfig
from tests.integration.conftest import on
from tests.integration.prompts import BLOCK_SIZE
from tests.integration.running_cluster import RunningCluster
from tests.integration.test_kv_wire import forward

_NUM_REQUESTS = 100
_NUM_AT_ONCE = 8
_NUM_TOKENS = 6
_TEXT = "The lighthouse keeper climbed the stairs, lit the lamp and looked out over the sea. "
_PROMPTS = [f"Story {kind}. " + _TEXT * (1 + kind) for kind in range(6)]


@on("int8-drill")
async def test_answers_are_right_or_errors_are_explicit(
    cluster: RunningCluster, session: aiohttp.ClientSession
) -> None:
    places = asyncio.Semaphore(_NUM_AT_ONCE)
    answers: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    errors: list[str] = []

    async def request(number: int) -> None:
        body = {
            "prompt": _PROMPTS[number % len(_PROMPTS)], "max_tokens": _NUM_TOKENS,
            "temperature": 0, "ignore_eos": True, "return_token_ids": True,
            "cache_salt": f"salt-{number}",  # so that all KV is transferred
        }  # fmt: skip
        async with places, session.post(f"{cluster.url}/v1/completions", json=body) as response:
            answer = await response.json()
        if response.status != 200:
            errors.append(answer["error"]["code"])
            return
        choice = answer["choices"][0]
        assert len(choice["token_ids"]) == _NUM_TOKENS
        answers.add((tuple(choice["prompt_token_ids"]), tuple(choice["token_ids"])))

    await asyncio.gather(*(request(number) for number in range(_NUM_REQUESTS)))
    cluster.wait_idle()
    async with session.get(f"{cluster.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    retries = [line for line in lines if line.startswith("pdmesh:gateway_retries_total")]
    num_retries = sum(float(line.rpartition(" ")[2]) for line in retries)
    print(f"{len(errors)} errors, {num_retries:.0f} retries in {_NUM_REQUESTS} requests")
    assert num_retries > 0, "no fault was felt"
    assert set(errors) <= {"transfer_failed"}
    assert len(errors) <= _NUM_REQUESTS / 8  # none as a rule, seven in one of a dozen runs
    assert len(answers) == len(_PROMPTS), "an answer differed between attempts"
    _check_greedy(answers)


def _check_greedy(answers: set[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Each token is the one that an engine in this process gives, to the bit."""
    num_blocks = 2 + max(len(prompt) for prompt, _ in answers) // BLOCK_SIZE
    config = WorkerConfig(
        role="prefill", worker_id="alone", redis_url="redis://unused", weights="int8",
        kv_blocks=num_blocks, block_size=BLOCK_SIZE,
    )  # fmt: skip
    engine = Engine(config, CpuBackend("int8", 2))
    for prompt, tokens in answers:
        logits = forward(engine, [*prompt, *tokens], 0)[len(prompt) - 1 : -1]
        assert tuple(logits.argmax(1).tolist()) == tokens
