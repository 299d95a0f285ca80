"""Workers of several ranks through the whole stack: equal tokens, clean ends, no orphans.

The model made here has 4 KV heads; what the packaged one (9 heads, 3 KV heads) can be divided
among is 3.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.integration.own_model import save_own_model
from tests.integration.reference import Reference
from tests.integration.running_cluster import RunningCluster, ask, joined, stream
from tests.integration.test_worker_metrics import scrape
from tests.integration.up_process import Up, wait_until

_BLOCK_BYTES = 4 * 2 * 4 * 16 * 32 * 4
"""Layers, K and V, heads, slots, head_dim, float32."""
_FLAGS = ("--port", "0", "--weights", "fp32", "--kv-blocks", "64")
_PROMPTS = ("The river", "snow lies until the morning", "x" * 150, "Zwölf 🚣 boats " * 12)
_NUM_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor-parallel") / "River-Llama"
    save_own_model(
        folder,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
    )
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Greedy answers of one prefill and one decode worker of one rank each."""
    up = Up(tmp_path_factory.mktemp("one-rank"), *_FLAGS, "--model", str(folder))
    try:
        return asyncio.run(_answers(RunningCluster(up)))
    finally:
        up.close()


@pytest.fixture
def start_cluster(folder: Path, tmp_path: Path) -> Iterator[Callable[..., RunningCluster]]:
    """Start the model with these flags; killed after the test."""
    started: list[Up] = []

    def run(*flags: str) -> RunningCluster:
        started.append(Up(tmp_path, *_FLAGS, "--model", str(folder), *flags))
        return RunningCluster(started[0])

    yield run
    for up in started:
        up.close()


async def _answers(cluster: RunningCluster) -> list[list[int]]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=500)) as session:
        asked = (
            ask(cluster, session, prompt, max_tokens=_NUM_TOKENS, ignore_eos=True)
            for prompt in _PROMPTS
        )
        return [answer.token_ids for answer in await asyncio.gather(*asked)]


def _followers(worker_pid: int) -> list[int]:
    """Processes of a worker's other ranks."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            words = stat.with_name("cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == worker_pid and fields[0] != "Z" and b"_worker.follower" in words:
            found.append(int(stat.parent.name))
    return found


def _is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def _leave(cluster: RunningCluster, session: aiohttp.ClientSession, turn: int) -> None:
    """Ask for a long answer and go: before the first token, or after some."""
    events = stream(
        cluster, session, f"{turn} boats " * (4 + 20 * (turn % 3)), max_tokens=200, ignore_eos=True
    )
    try:
        async with asyncio.timeout(0.01 * turn if turn % 2 else 30):
            for _ in range(1 + turn):
                await anext(events)
    except TimeoutError:
        pass
    finally:
        await events.aclose()


def _kv_bytes(cluster: RunningCluster) -> float:
    workers = cluster.get("/debug/census")["workers"]
    (endpoint,) = (worker["http_endpoint"] for worker in workers if worker["role"] == "prefill")
    return scrape(endpoint)["pdmesh:kv_transfer_bytes_total"]


@pytest.mark.parametrize(
    "flags", [("--prefill-tp", "2", "--kv-layer-groups", "2"), ("--decode-tp", "2")]
)
async def test_between_different_numbers_of_ranks(
    flags: tuple[str, ...],
    start_cluster: Callable[..., RunningCluster],
    expected: list[list[int]],
    session: aiohttp.ClientSession,
) -> None:
    cluster = start_cluster(*flags)
    assert await _answers(cluster) == expected
    cluster.wait_idle()
    moved = _kv_bytes(cluster)
    assert moved > 0
    assert moved % _BLOCK_BYTES == 0, "each head of a block once"
    for turn in range(8):
        await _leave(cluster, session, turn)
        await asyncio.to_thread(cluster.wait_idle)  # meanwhile the loop closes the connection
    await asyncio.gather(*(_leave(cluster, session, turn) for turn in range(8)))
    await asyncio.to_thread(cluster.wait_idle)
    assert await _answers(cluster) == expected
    children = cluster.up.children()
    ranks = [pid for name in ("prefill-0", "decode-0") for pid in _followers(children[name])]
    assert len(ranks) == 1
    cluster.up.process.send_signal(signal.SIGTERM)
    code, _, errors = cluster.up.finish(100)
    assert code == 0, errors
    assert all(map(_is_gone, ranks))


async def test_a_rank_dies_mid_stream(
    start_cluster: Callable[..., RunningCluster], session: aiohttp.ClientSession
) -> None:
    cluster = start_cluster("--tensor-parallel", "2", "--decode", "2")
    fields: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
    undisturbed = await ask(cluster, session, _PROMPTS[0], **fields)
    cluster.wait_idle()
    killed, events, ranks = "", [], []
    async for event in stream(cluster, session, _PROMPTS[0], **fields):
        events.append(event)
        if len(events) == 12:
            census = cluster.census()
            [killed] = [n for n in census if n.startswith("decode") and census[n]["running"]]
            worker = cluster.up.children()[killed]
            ranks = [worker, *_followers(worker)]
            os.kill(ranks[1], signal.SIGKILL)
    assert joined(events).token_ids == undisturbed.token_ids
    wait_until(lambda: all(map(_is_gone, ranks)))
    cluster.wait_idle(300)  # it is back
    log = cluster.up.errors.read_text()
    assert f"rank 1 of {killed} ended: killed by SIGKILL" in log

    # Rank 0 takes its followers along, and so does `up` all of them.
    worker = cluster.up.children()["prefill-0"]
    (follower,) = _followers(worker)
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: _is_gone(follower))
    cluster.wait_idle(300)
    again = await ask(cluster, session, _PROMPTS[0], **fields)
    assert again.token_ids == undisturbed.token_ids
    children = cluster.up.children()
    ranks = [pid for name in ("prefill-0", "decode-0", "decode-1")
             for pid in (children[name], *_followers(children[name]))]  # fmt: skip
    assert len(ranks) == 6
    cluster.up.process.kill()
    wait_until(lambda: all(map(_is_gone, ranks)))


async def test_three_ranks_of_the_packaged_model(
    start: Callable[..., Up], session: aiohttp.ClientSession, reference: Reference
) -> None:
    up = start("--port", "0", "--weights", "fp32", "--kv-memory-mib", "96", "--decode-tp", "3")
    cluster = RunningCluster(up)
    answer = await ask(cluster, session, "The capital of France is", max_tokens=12)
    assert reference.mismatches(answer.prompt_ids, answer.token_ids) == []
    cluster.wait_idle()
