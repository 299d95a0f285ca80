"""Shutdown of a gateway: what runs may finish, what cannot is told so, nothing new begins."""

from __future__ import annotations

import asyncio
import json

from tests.unit.gateway.client import CHAT, COMPLETIONS, MESSAGES, Client
from tests.unit.gateway.scripted_cluster import Script, ScriptedCluster, wait_until

_ENDLESS = {"max_tokens": 5000}


async def test_nothing_runs(client: Client, cluster: ScriptedCluster, script: Script) -> None:
    await cluster.pair(script)
    await cluster.show_all()
    await client.complete()
    async with asyncio.timeout(50):
        await cluster.server.drain(60)
    for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": MESSAGES})):
        status, answer = await client.post(path, body)
        assert (status, answer["error"]["code"]) == (503, "unavailable")


async def test_what_runs_may_finish(client: Client, cluster: ScriptedCluster) -> None:
    await cluster.pair(Script(delay_s=0.01))
    await cluster.show_all()
    asking = asyncio.create_task(client.complete(max_tokens=20))
    await wait_until(lambda: len(cluster.server.running) == 1)
    async with asyncio.timeout(50):
        await cluster.server.drain(60)
    assert (await asking)["choices"][0]["finish_reason"] == "length"
    assert not cluster.server.running


async def test_what_cannot_finish_is_told(client: Client, cluster: ScriptedCluster) -> None:
    prefill, decode = await cluster.pair(Script(delay_s=0.01))
    await cluster.show_all()
    streaming = asyncio.create_task(client.stream(COMPLETIONS, n=2, **_ENDLESS))
    asking = asyncio.create_task(client.post(COMPLETIONS, {"prompt": "hi", **_ENDLESS}))
    await wait_until(lambda: decode.num_running == 3)
    await cluster.server.drain(0.1)
    *tokens, last = await streaming
    assert tokens
    assert all("error" not in json.loads(token) for token in tokens)
    error = json.loads(last)["error"]
    assert (error["type"], error["code"]) == ("server_error", "unavailable")
    status, answer = await asking
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    await wait_until(lambda: prefill.num_running == decode.num_running == 0)
    assert cluster.server.num_open_requests == 0
    assert not cluster.server.running


async def test_a_client_that_left_is_not_waited_for(
    client: Client, cluster: ScriptedCluster
) -> None:
    await cluster.pair(Script(delay_s=0.01))
    await cluster.show_all()
    streaming = asyncio.create_task(client.stream(COMPLETIONS, **_ENDLESS))
    await wait_until(lambda: len(cluster.server.running) == 1)
    draining = asyncio.create_task(cluster.server.drain(60))
    streaming.cancel()
    async with asyncio.timeout(50):
        await draining
    assert not cluster.server.running
