"""The dashboard's figures over HTTP, made of what the gateway has seen, and the page's head."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import msgspec

from gateway.pages import dashboard_page
from mesh.leg_timing import LegTiming
from mesh.messages import RequestFailed, TokenOutput
from tests.unit.gateway.client import COMPLETIONS, Client
from tests.unit.gateway.scripted_cluster import Script, ScriptedCluster, wait_until

FIGURES = "/debug/dashboard"
SECRET = "what nobody may see"


async def figures(client: Client) -> dict[str, Any]:
    status, body = await client.get(FIGURES)
    assert status == 200
    return body


def with_timing(output: TokenOutput) -> list[TokenOutput]:
    timing = LegTiming(queue_s=0.0, compute_s=1e-4, kv_hidden_s=0.5, kv_exposed_s=1e-4, kv_bytes=9)
    return [msgspec.structs.replace(output, timing=timing)]


async def test_requests_transfers_and_workers(client: Client, cluster: ScriptedCluster) -> None:
    prefill, decode = await cluster.pair(Script(answer=[7, 8, 9]))
    prefill.script = decode.script = Script(answer=[7, 8, 9], tamper=with_timing)
    await cluster.show_all()
    await client.complete(prompt=SECRET, max_tokens=2, ignore_eos=True)
    shown = await figures(client)
    assert [worker["id"] for worker in shown["workers"]] == [prefill.id, decode.id]
    for worker in shown["workers"]:
        assert worker["state"] == "up"
        assert worker["kv_blocks_total"] == 4096
        assert 0 <= worker["load_age_s"] < 5
    [request] = shown["requests"]
    assert request["outcome"] == "length"
    assert request["output_tokens"] == 2
    assert (request["prefill_worker"], request["decode_worker"]) == (prefill.id, decode.id)
    assert abs(sum(request["parts"].values()) - request["total_s"]) < 1e-6
    assert request["kv_bytes"] == 9
    [flow] = shown["flows"]
    assert (flow["prefill"], flow["decode"], flow["bytes"]) == (prefill.id, decode.id, 9)
    assert shown["summary"]["finished"] == 1
    assert shown["summary"]["ttft_p50_s"] > 0
    assert SECRET not in json.dumps(shown)


async def test_states_of_workers(
    client: Client, cluster: ScriptedCluster, script: Script, monkeypatch
) -> None:
    prefill, decode = await cluster.pair(script)
    draining = msgspec.structs.replace(decode.load(), draining=True)
    monkeypatch.setattr(decode, "load", lambda: draining)
    await cluster.show_all()
    await prefill.close()
    await wait_until(lambda: not all(worker.is_up for worker in cluster.cluster.workers))
    shown = await figures(client)
    assert [worker["state"] for worker in shown["workers"]] == ["down", "draining"]
    assert not shown["ready"]


async def test_failures_are_remembered_by_their_code(
    client: Client, cluster: ScriptedCluster
) -> None:
    fail = RequestFailed(
        request_id="", transfer_id="", code="transfer_failed", message="", retryable=False
    )
    await cluster.pair(Script(fail=fail))
    await cluster.show_all()
    status, _ = await client.post(COMPLETIONS, {"prompt": [5] * 10})
    assert status == 503
    shown = await figures(client)
    [request] = shown["requests"]
    assert request["outcome"] == "transfer_failed"
    assert request["failed"]
    assert request["prompt_tokens"] == 10
    assert request["ttft_s"] is None
    assert shown["summary"]["failed"] == 1


async def test_a_request_that_is_wrong_is_none(client: Client, cluster: ScriptedCluster) -> None:
    await cluster.pair(Script())
    await cluster.show_all()
    status, _ = await client.post(COMPLETIONS, {"prompt": [5], "max_tokens": -1})
    assert status == 400
    assert (await figures(client))["requests"] == []


async def test_the_page_runs_only_what_its_policy_names(client: Client) -> None:
    async with client.session.get(client.cluster.url + "/dashboard") as response:
        text = await response.text()
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/html; charset=utf-8"
        policy = response.headers["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; ")
    for tag in ("script", "style"):
        [content] = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in policy
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "innerHTML" not in text


def test_every_file_of_the_page_is_in_it() -> None:
    folder = Path(dashboard_page.__file__).parent / "page"
    page = dashboard_page.load_page().body.decode()
    for file in folder.iterdir():
        assert file.suffix == ".html" or file.read_text() in page
