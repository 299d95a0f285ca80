"""Processes die or freeze under load: clients see latency, and nothing stays held."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from typing import Any

import aiohttp

from tests.integration.conftest import on
from tests.integration.reference import MARGIN, Reference
from tests.integration.running_cluster import RunningCluster, ask, joined, stream
from tests.integration.up_process import wait_until

_RECOVERY_TIMEOUT_S = 300.0
_LONG = 2000
_PROMPT = [{"role": "user", "content": "Write a short story about a lighthouse keeper."}]


def _busy(cluster: RunningCluster, role: str) -> list[str]:
    """Workers of a role that compute something."""
    census = cluster.census()
    return [name for name, held in census.items() if name.startswith(role) and held["running"] > 0]


def _kill(cluster: RunningCluster, name: str) -> None:
    os.kill(cluster.up.children()[name], signal.SIGKILL)


def _wait_recovered(cluster: RunningCluster, *killed: str) -> None:
    """What lived is clean at once; what was killed comes back."""
    survivors = cluster.start_census.keys() - set(killed)
    wait_until(lambda: all(cluster.census().get(n) == cluster.start_census[n] for n in survivors))
    cluster.wait_idle(_RECOVERY_TIMEOUT_S)


@on("fp32-2p2d")
async def test_a_decode_worker_dies_mid_stream(
    cluster: RunningCluster, session: aiohttp.ClientSession, reference: Reference
) -> None:
    undisturbed = await ask(cluster, session, _PROMPT, max_tokens=40, ignore_eos=True)
    margins = reference.margins(undisturbed.prompt_ids, undisturbed.token_ids)
    assert min(margins) > MARGIN, "pick another prompt"
    cluster.wait_idle()
    events: list[dict[str, Any]] = []
    killed = ""
    async for event in stream(cluster, session, _PROMPT, max_tokens=40, ignore_eos=True):
        events.append(event)
        if len(events) == 12:
            [killed] = _busy(cluster, "decode")
            _kill(cluster, killed)
    answer = joined(events)
    assert answer.token_ids == undisturbed.token_ids
    assert answer.text == undisturbed.text
    assert answer.finish_reason == "length"
    _wait_recovered(cluster, killed)


@on("fp32-2p2d")
async def test_a_decode_worker_dies_inside_a_grammar(
    cluster: RunningCluster, session: aiohttp.ClientSession
) -> None:
    pattern = "[a-z]{8}( [a-z]{5}){12}!"
    fields: dict[str, Any] = {"structured_outputs": {"regex": pattern}, "max_tokens": 200}
    events: list[dict[str, Any]] = []
    killed = ""
    async for event in stream(cluster, session, _PROMPT, temperature=1, seed=11, **fields):
        events.append(event)
        if len(events) == 12:
            [killed] = _busy(cluster, "decode")
            _kill(cluster, killed)
    answer = joined(events)
    assert re.fullmatch(pattern, answer.text)
    assert answer.finish_reason == "stop"
    _wait_recovered(cluster, killed)


@on("fp32-2p2d")
async def test_a_prefill_worker_dies_mid_prompt(
    cluster: RunningCluster,
    session: aiohttp.ClientSession,
    reference: Reference,
    text_ids: list[int],
) -> None:
    prompt = (text_ids + text_ids[::-1] + text_ids)[:_LONG]
    fields = {"max_tokens": 8, "ignore_eos": True, "cache_salt": "dies"}

    async def read() -> list[dict[str, Any]]:
        return [event async for event in stream(cluster, session, prompt, **fields)]

    reading = asyncio.create_task(read())
    killed = ""
    while not killed:
        assert not reading.done(), "it was over before anything could be killed"
        for name, held in cluster.census().items():
            if name.startswith("prefill") and 0 < held["queued_tokens"] < _LONG:
                killed = name
        await asyncio.sleep(0)
    _kill(cluster, killed)
    answer = joined(await reading)
    assert len(answer.token_ids) == 8
    assert reference.mismatches(prompt, answer.token_ids) == []
    _wait_recovered(cluster, killed)
    again = await ask(cluster, session, prompt, **{**fields, "cache_salt": "undisturbed"})
    assert again.token_ids == answer.token_ids


@on("fp32-2p2d")
async def test_one_worker_of_each_role_dies_under_eight_streams(
    cluster: RunningCluster, session: aiohttp.ClientSession, reference: Reference
) -> None:
    num_started = 0

    async def read(index: int) -> list[dict[str, Any]]:
        nonlocal num_started
        messages = [{"role": "user", "content": f"Tell me about the number {index}."}]
        events = []
        async for event in stream(cluster, session, messages, max_tokens=20, ignore_eos=True):
            events.append(event)
            num_started += len(events) == 2
        return events

    reading = asyncio.gather(*(read(index) for index in range(8)))
    while num_started < 4:  # noqa: ASYNC110 (counted by the readers)
        await asyncio.sleep(0.01)
    for name in ("decode-0", "prefill-1"):
        _kill(cluster, name)
    for events in await reading:
        answer = joined(events)
        assert len(answer.token_ids) == 20
        assert reference.mismatches(answer.prompt_ids, answer.token_ids) == []
    _wait_recovered(cluster, "decode-0", "prefill-1")


@on("int8-1p1d")
async def test_the_registry_freezes_and_dies(
    cluster: RunningCluster, session: aiohttp.ClientSession
) -> None:
    expected = await ask(cluster, session, _PROMPT, max_tokens=16)
    valkey = cluster.up.children()["valkey"]
    os.kill(valkey, signal.SIGSTOP)
    frozen_s = time.monotonic()
    try:
        while time.monotonic() - frozen_s < 4.5:  # every heartbeat in it would have expired
            answer = await ask(cluster, session, _PROMPT, max_tokens=16)
            assert answer.token_ids == expected.token_ids
            await asyncio.sleep(0.2)
        num_events = 0
        async for _ in stream(cluster, session, _PROMPT, max_tokens=64, ignore_eos=True):
            num_events += 1
            if num_events == 5:
                os.kill(valkey, signal.SIGKILL)
        assert num_events == 64
        answer = await ask(cluster, session, _PROMPT, max_tokens=16)
        assert answer.token_ids == expected.token_ids
    finally:
        wait_until(lambda: cluster.up.children().get("valkey", valkey) != valkey)
    _wait_recovered(cluster)
    answer = await ask(cluster, session, _PROMPT, max_tokens=16)
    assert answer.token_ids == expected.token_ids
