"""Traces, profiles and logs of one cluster that has all of them switched on."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cli.profile import format_report, run_profile
from tests.integration.otlp_receiver import OtlpReceiver
from tests.integration.running_cluster import RunningCluster, ask, joined, stream
from tests.integration.up_process import Up

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPANS = {
    "POST /v1/completions", "tokenise", "attempt",
    "queue", "prefill", "kv transfer",
    "kv receive", "decode queue", "decode",
}  # fmt: skip


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("observed")


@pytest.fixture(scope="module")
def observed(folder: Path, receiver: OtlpReceiver) -> Iterator[RunningCluster]:
    (folder / "traces").mkdir()
    up = Up(
        folder, "--port", "0", "--weights", "int8", "--kv-memory-mib", "128",
        "--otlp-endpoint", receiver.endpoint, "--profile-dir", str(folder / "traces"),
        "--log-format", "json", "--log-level", "debug", "--log-dir", str(folder / "logs"),
    )  # fmt: skip
    try:
        yield RunningCluster(up)
    finally:
        up.close()


def prompt() -> list[int]:
    return random.choices(range(10, 40_000), k=200)


async def test_one_trace_goes_through_every_process(
    observed: RunningCluster, receiver: OtlpReceiver, session: aiohttp.ClientSession
) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01", "X-Request-Id": "mine"}
    start_ns = time.time_ns()
    events = [
        event
        async for event in stream(
            observed, session, prompt(), headers, max_tokens=6, ignore_eos=True
        )
    ]
    end_ns = time.time_ns()
    assert len(joined(events).token_ids) == 6
    spans = await asyncio.to_thread(receiver.wait_for, TRACE_ID, SPANS)
    by_name = {span.name: span for span in spans}
    assert len(spans) == len(by_name)
    root, attempt = by_name["POST /v1/completions"], by_name["attempt"]
    assert root.parent_id == "b7ad6b7169203331"
    assert root.attributes["pdmesh.client_request_id"] == "mine"
    assert by_name["tokenise"].parent_id == attempt.parent_id == root.span_id
    workers = {name: by_name[name] for name in SPANS - {root.name, "tokenise", "attempt"}}
    assert {span.parent_id for span in workers.values()} == {attempt.span_id}
    services = {name: span.service for name, span in by_name.items()}
    assert services["tokenise"] == services["attempt"] == "pdmesh-gateway"
    assert services["prefill"] == services["kv transfer"] == "pdmesh-prefill"
    assert services["decode"] == services["kv receive"] == "pdmesh-decode"
    assert not any(span.is_error for span in spans)
    # One host, one clock: everything lies within what the client waited.
    assert all(start_ns <= span.start_ns <= span.end_ns for span in spans)
    assert root.end_ns <= end_ns + 5_000_000
    assert by_name["prefill"].attributes["pdmesh.num_tokens"] == 200
    assert by_name["decode"].attributes["pdmesh.num_tokens"] == 5
    assert by_name["kv transfer"].attributes["pdmesh.kv_bytes"] > 0


async def test_an_unsampled_request_leaves_no_trace(
    observed: RunningCluster, receiver: OtlpReceiver, session: aiohttp.ClientSession
) -> None:
    silent, told = "1" * 32, "2" * 32
    for trace_id, flag in ((silent, "00"), (told, "01")):
        headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-{flag}"}
        async for _ in stream(observed, session, prompt(), headers, max_tokens=2):
            pass
    await asyncio.to_thread(receiver.wait_for, told, SPANS)
    assert receiver.wait_for(silent, set()) == []


async def test_a_request_is_found_in_every_log(
    observed: RunningCluster, folder: Path, session: aiohttp.ClientSession
) -> None:
    body = {"prompt": prompt(), "max_tokens": 2}
    async with session.post(f"{observed.url}/v1/completions", json=body) as response:
        request_id = response.headers["X-Request-Id"]
        assert (await response.json())["id"] == f"cmpl-{request_id}"
    records = [
        json.loads(line)
        for path in (folder / "logs").glob("*.log")
        for line in path.read_text().splitlines()
        if request_id in line
    ]
    assert {record["proc"] for record in records} == {"gateway", "prefill-0", "decode-0"}
    legs = [record for record in records if "transfer_id" in record]
    assert {record["request_id"] for record in legs} == {f"{request_id}-0"}
    assert len({record["transfer_id"] for record in legs}) == 1


def profile(worker: dict[str, Any], query: str) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        f"{worker['http_endpoint']}/debug/profile?{query}", method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=200) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def range_names(trace: Path) -> set[str]:
    return {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}


def workers(cluster: RunningCluster) -> dict[str, dict[str, Any]]:
    return {worker["role"]: worker for worker in cluster.get("/debug/census")["workers"]}


BOARD = {
    "gateway": (
        "e2e_request_latency_seconds_bucket", "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket", "time_per_output_token_seconds_bucket",
        "prompt_tokens_total", "generation_tokens_total", "request_success_total",
        "request_prompt_tokens_bucket", "request_generation_tokens_bucket",
        "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum",
        "request_decode_time_seconds_sum", "request_max_num_generation_tokens_sum",
    ),
    "worker": (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "gpu_cache_usage_perc", "iteration_tokens_total_bucket", "prefix_cache_hits_total",
    ),
}  # fmt: skip
"""What the boards that vLLM ships ask for, each by ``model_name``."""


def samples(endpoint: str) -> list[str]:
    text = urllib.request.urlopen(f"{endpoint}/metrics", timeout=60).read().decode()
    return [line for line in text.splitlines() if not line.startswith("#")]


async def test_boards_of_vllm_find_their_metrics(
    observed: RunningCluster, session: aiohttp.ClientSession
) -> None:
    await ask(observed, session, prompt(), max_tokens=3, ignore_eos=True)
    await ask(observed, session, prompt(), max_tokens=3, ignore_eos=True, service_tier="batch")
    workers_by_role = workers(observed)
    gateway = await asyncio.to_thread(samples, observed.url)
    prefill = await asyncio.to_thread(samples, workers_by_role["prefill"]["http_endpoint"])
    decode = await asyncio.to_thread(samples, workers_by_role["decode"]["http_endpoint"])
    shown = [(gateway, "gateway"), (prefill, "worker"), (decode, "worker")]
    for lines, kind in shown:
        for name in BOARD[kind]:
            found = [line for line in lines if line.startswith(f"vllm:{name}{{")]
            assert found, name
            assert all(f'model_name="{observed.model}"' in line for line in found)
    for name in ("request_ttft", "request_tpot"):
        for slo_class in ("interactive", "batch"):
            (count,) = [
                line for line in gateway
                if line.startswith(f"pdmesh:{name}_seconds_count{{") and slo_class in line
            ]  # fmt: skip
            assert float(count.split()[-1]) >= 1
    (sent,) = [line for line in prefill if line.startswith("pdmesh:kv_transfer_bytes_total ")]
    assert float(sent.split()[-1]) > 0


async def test_profiles_of_both_roles(
    observed: RunningCluster, session: aiohttp.ClientSession, folder: Path
) -> None:
    stop = threading.Event()

    async def load() -> None:
        while not stop.is_set():
            # Short ones: every step of a prefill worker ends a prompt and samples.
            await ask(observed, session, prompt()[:12], max_tokens=16, ignore_eos=True)

    loading = [asyncio.create_task(load()) for _ in range(3)]
    asked = [
        asyncio.to_thread(profile, worker, "steps=8&timeout_s=60")
        for worker in workers(observed).values()
    ]
    answers = await asyncio.gather(*asked)
    stop.set()
    await asyncio.gather(*loading)
    for (status, report), role in zip(answers, workers(observed), strict=True):
        assert status == 200
        assert (report["role"], report["steps"]) == (role, 8)
        phases = {row["phase"] for row in report["ops"]}
        assert role in phases
        ops = {row["op"] for row in report["ops"]}
        assert {"qkv", "attention", "output", "gate_up", "down", "head", "norm", "sample"} <= ops
        layer_calls = {row["calls"] for row in report["ops"] if row["op"] == "attention"}
        assert sum(layer_calls) % 30 == 0
        assert sum(report["shares"].values()) == pytest.approx(1)
        assert report["bound"].startswith("bound by ")
        assert sum(row["time_s"] for row in report["ops"]) <= report["wall_s"]
        assert report["limits"]["bytes_per_s"] > 1e8
        (linear,) = [r for r in report["ops"] if (r["phase"], r["op"]) == (role, "gate_up")]
        assert linear["flops_per_s"] > 0
        trace = Path(report["trace_file"])
        assert trace.parent == folder / "traces"
        assert f"{role}/attention/layer 29" in range_names(trace)
        assert format_report(report["worker"], report).count("\n") > 10


async def test_one_profile_at_a_time_and_not_for_ever(observed: RunningCluster) -> None:
    observed.wait_idle()
    worker = workers(observed)["decode"]
    idle = asyncio.create_task(asyncio.to_thread(profile, worker, "steps=5&timeout_s=2"))
    await asyncio.sleep(0.5)
    # The control loop goes on meanwhile: it refuses a second one and answers others.
    assert (await asyncio.to_thread(profile, worker, "steps=5"))[0] == 409
    status, report = await idle
    assert (status, report["steps"], report["trace_file"]) == (200, 0, None)
    for query in ("steps=0", "steps=x", "steps=1e9", "timeout_s=nan"):
        assert (await asyncio.to_thread(profile, worker, query))[0] == 400


async def test_the_command_prints_a_table(
    observed: RunningCluster, session: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> int:
        return run_profile(observed.url, worker="decode-0", steps=3, timeout_s=60)

    profiling = asyncio.create_task(asyncio.to_thread(run))
    await asyncio.sleep(0.2)
    while not profiling.done():
        await ask(observed, session, prompt()[:12], max_tokens=8, ignore_eos=True)
    assert await profiling == 0
    printed = capsys.readouterr().out
    assert "decode-0 (decode): 3 steps" in printed
    assert "bound by " in printed
    assert "prefill-0" not in printed
