"""Where a request's time went: the parts add up to what its client measured."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from typing import Any

import aiohttp

from tests.integration.conftest import on
from tests.integration.running_cluster import RunningCluster, stream

HEADERS = {"X-Pdmesh-Timing": "1"}
PROMPT_TOKENS = 300


async def timed(
    cluster: RunningCluster, session: aiohttp.ClientSession, max_tokens: int
) -> tuple[float, dict[str, Any]]:
    """Seconds that the client measured, and the gateway's account of them."""
    prompt = random.choices(range(10, 40_000), k=PROMPT_TOKENS)
    start_s = time.monotonic()
    events = [
        event
        async for event in stream(
            cluster, session, prompt, HEADERS, max_tokens=max_tokens, ignore_eos=True,
            stream_options={"include_usage": True},
        )
    ]  # fmt: skip
    elapsed_s = time.monotonic() - start_s
    *tokens, timing, usage = events
    assert not any("pdmesh_timing" in event for event in (*tokens, usage))
    assert timing["choices"] == []
    assert timing["usage"] is None
    assert usage["usage"]["completion_tokens"] == max_tokens
    (account,) = timing["pdmesh_timing"]
    return elapsed_s, account


def check_account(account: dict[str, Any]) -> None:
    parts = account["parts"]
    assert min(parts.values()) >= 0
    assert abs(sum(parts.values()) - account["total_s"]) < 1e-6
    assert parts["prefill_s"] > 0
    assert parts["decode_s"] > 0
    assert parts["retry_s"] == 0
    assert account["kv_hidden_s"] + parts["kv_exposed_s"] > 0
    assert account["attempts"] == 1
    before_first = ("receive_s", "tokenise_s", "dispatch_s", "queue_s", "prefill_s")
    assert sum(parts[part] for part in before_first) < account["ttft_s"]


@on("int8-1p1d")
async def test_the_parts_add_up_to_what_the_client_waited(
    cluster: RunningCluster, session: aiohttp.ClientSession
) -> None:
    await timed(cluster, session, 8)
    runs = [await timed(cluster, session, 48) for _ in range(4)]
    for elapsed_s, account in runs:
        check_account(account)
        assert account["total_s"] <= elapsed_s
    errors = [1 - account["total_s"] / elapsed_s for elapsed_s, account in runs]
    assert statistics.median(errors) < 0.02, errors
    # Alone on a loopback, hardly anything is left that no process counted.
    unexplained = [account["parts"]["network_s"] / account["total_s"] for _, account in runs]
    assert statistics.median(unexplained) < 0.1, unexplained


@on("int8-1p1d")
async def test_they_add_up_while_requests_queue(
    cluster: RunningCluster, session: aiohttp.ClientSession
) -> None:
    runs = await asyncio.gather(*(timed(cluster, session, 24) for _ in range(10)))
    for _, account in runs:
        check_account(account)
    errors = [1 - account["total_s"] / elapsed_s for elapsed_s, account in runs]
    assert statistics.median(errors) < 0.02, errors
    # A step holds less than two of these prompts: the last one waited for all the others.
    queues = sorted(account["parts"]["queue_s"] for _, account in runs)
    prefill_s = min(account["parts"]["prefill_s"] for _, account in runs)
    assert queues[-1] > 2 * prefill_s


@on("int8-1p1d")
async def test_whole_answers_have_it_on_demand_only(
    cluster: RunningCluster, session: aiohttp.ClientSession
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "n": 2}
    url = f"{cluster.url}/v1/chat/completions"
    async with session.post(url, json=body, headers=HEADERS) as response:
        first, second = (await response.json())["pdmesh_timing"]
    async with session.post(url, json=body) as response:
        assert "pdmesh_timing" not in await response.json()
    assert (first["index"], second["index"]) == (0, 1)
    assert first["tpot_s"] is None
    # The first ended at the prefill worker's token; the second one was made from its KV.
    assert first["prefill_worker"] == "prefill-0"
    assert second["prefill_worker"] is None
    for account in (first, second):
        assert abs(sum(account["parts"].values()) - account["total_s"]) < 1e-6
        assert account["parts"]["prefill_s"] > 0
        assert account["parts"]["decode_s"] == 0
