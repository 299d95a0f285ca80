"""compose.yaml for real: up, chat, scale, a container that dies, scale down under load, down.

The tests build on each other and run in this order.
"""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.deploy.composed import Composed
from tests.integration.running_cluster import RunningCluster, joined, stream
from tests.integration.up_process import wait_until

_PROMPT = [{"role": "user", "content": "Write a short story about a lighthouse keeper."}]
_SCALE_TIMEOUT_S = 120.0

# The first one builds the images.
pytestmark = pytest.mark.timeout(900)


def _workers(cluster: RunningCluster, role: str) -> dict[str, dict[str, int]]:
    return {name: held for name, held in cluster.census().items() if name.startswith(role)}


def _wait_for_workers(cluster: RunningCluster, role: str, number: int) -> None:
    wait_until(lambda: len(_workers(cluster, role)) == number, _SCALE_TIMEOUT_S)


def _retries(cluster: RunningCluster) -> float:
    with urllib.request.urlopen(f"{cluster.url}/metrics", timeout=10) as response:
        text = response.read().decode()
    found = re.findall(r"^pdmesh:gateway_retries_total\{.*?\} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


async def _story(
    cluster: RunningCluster, session: aiohttp.ClientSession, num_tokens: int, started: list[int]
) -> list[dict[str, Any]]:
    """A streamed answer of this many tokens; ``started`` grows with its first token."""
    events = []
    fields = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 1}
    async for event in stream(cluster, session, _PROMPT, **fields):
        events.append(event)
        if len(events) == 3:
            started.append(1)
    return events


async def _all_started(started: list[int], number: int) -> None:
    async with asyncio.timeout(120):
        while len(started) < number:  # noqa: ASYNC110 - the workers bring it about
            await asyncio.sleep(0.02)


def test_the_cluster_comes_up_healthy(cluster: RunningCluster, composed: Composed) -> None:
    composed.wait_healthy(60)
    assert [len(_workers(cluster, role)) for role in ("prefill", "decode")] == [1, 1]


def test_the_containers_have_no_rights_that_they_do_not_need(composed: Composed) -> None:
    for role in ("gateway", "prefill", "decode"):
        (container,) = composed.containers(role)
        assert container["Config"]["User"] == "10001:10001"
        assert container["HostConfig"]["CapDrop"] == ["ALL"]
        assert container["HostConfig"]["ReadonlyRootfs"]
        assert not container["HostConfig"]["Privileged"]
    ports = {
        role: {
            port: [binding["HostIp"] for binding in bindings or ()]
            for port, bindings in composed.containers(role)[0]["NetworkSettings"]["Ports"].items()
            if bindings
        }
        for role in ("redis", "gateway", "prefill", "decode")
    }
    assert ports == {
        "redis": {},
        "gateway": {"8000/tcp": ["127.0.0.1"]},
        "prefill": {},
        "decode": {},
    }


async def test_an_answer_streams_through_both_containers(
    cluster: RunningCluster, session: aiohttp.ClientSession
) -> None:
    answer = joined([event async for event in stream(cluster, session, _PROMPT, max_tokens=12)])
    assert len(answer.token_ids) == 12
    assert answer.text.strip()
    # The KV went from one container to the other.
    assert all(held["open_transfers"] == 0 for held in cluster.census().values())


def test_the_decode_pool_grows(cluster: RunningCluster, composed: Composed) -> None:
    composed.up(decode=2)
    _wait_for_workers(cluster, "decode", 2)
    assert len({composed.container_of(worker) for worker in _workers(cluster, "decode")}) == 2
    assert len(_workers(cluster, "prefill")) == 1


async def test_a_stream_survives_the_death_of_its_container(
    cluster: RunningCluster, composed: Composed, session: aiohttp.ClientSession
) -> None:
    killed = ""
    events: list[dict[str, Any]] = []
    fields = {"max_tokens": 60, "ignore_eos": True}
    async for event in stream(cluster, session, _PROMPT, **fields):
        events.append(event)
        if len(events) == 8:
            census = await asyncio.to_thread(_workers, cluster, "decode")
            (killed,) = [name for name, held in census.items() if held["running"]]
            await asyncio.to_thread(composed.kill, composed.container_of(killed))
    answer = joined(events)
    assert len(answer.token_ids) == 60
    assert answer.finish_reason == "length"
    wait_until(lambda: killed not in _workers(cluster, "decode"), 30)
    assert _retries(cluster) >= 1


async def test_the_decode_pool_shrinks_under_load_and_no_request_notices(
    cluster: RunningCluster, composed: Composed, session: aiohttp.ClientSession
) -> None:
    await asyncio.to_thread(composed.up, decode=2)
    await asyncio.to_thread(_wait_for_workers, cluster, "decode", 2)
    retries = _retries(cluster)
    started: list[int] = []
    number = 6
    stories: Awaitable[list[list[dict[str, Any]]]] = asyncio.gather(
        *(_story(cluster, session, 60, started) for _ in range(number))
    )
    await _all_started(started, number)
    census = await asyncio.to_thread(_workers, cluster, "decode")
    assert all(held["running"] for held in census.values()), "both should have work"
    await asyncio.to_thread(composed.up, decode=1)
    # While that went on and after it, too.
    late = await _story(cluster, session, 20, [])
    for events in [*await stories, late]:
        answer = joined(events)
        assert answer.finish_reason == "length"
    await asyncio.to_thread(_wait_for_workers, cluster, "decode", 1)
    # The worker ended what it had: nothing was computed twice.
    assert _retries(cluster) == retries


def test_nothing_is_left(composed: Composed) -> None:
    assert composed.left()["container"]
    assert _bridges()
    composed.down()
    assert composed.left() == {"container": [], "network": [], "volume": []}
    assert not _bridges()


def _bridges() -> list[str]:
    """Bridges of Docker networks on this machine."""
    return [path.name for path in Path("/sys/class/net").glob("br-*")]
