"""A real gateway with many scripted workers under requests of every kind, for its dashboard."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import aiohttp
import msgspec

from gateway.observe.history import History
from gateway.prompts.served_model import load_served_model
from mesh.leg_timing import LegTiming
from mesh.messages import TokenOutput
from mesh.model_text.model_files import resolve_model
from mesh.worker_info import LoadSnapshot
from tests.unit.gateway.scripted_cluster import Script, ScriptedCluster, ScriptedWorker

SLOT_S = 0.25
"""Short slots: the charts fill within seconds."""

SECRET = "the prompt that nobody may see"


@dataclass
class Figures:
    """What a worker says of itself."""

    used: float
    running: int
    waiting: int = 0
    quarantined: int = 0
    draining: bool = False


class DressedWorker(ScriptedWorker):
    """A scripted worker with a load and timings of its own."""

    figures = Figures(0.0, 0)

    def load(self) -> LoadSnapshot:
        figures = self.figures
        return msgspec.structs.replace(
            super().load(),
            kv_blocks_free=round(4096 * (1 - figures.used)),
            kv_blocks_quarantined=figures.quarantined,
            open_transfers=figures.running // 3,
            running=figures.running,
            waiting=figures.waiting,
            queued_tokens=700 * figures.waiting,
            step_time_s=0.004 * (1 + figures.running),
            tokens_per_s=70.0 * figures.running,
            draining=figures.draining,
        )


def _timed(role: str) -> Script:
    """Answers with the timings that a worker of this role reports."""
    number = itertools.count()
    firsts: set[str] = set()

    def tamper(output: TokenOutput) -> list[TokenOutput]:
        if output.transfer_id in firsts:
            return [output]
        firsts.add(output.transfer_id)
        scale = 0.0001 * (1 + next(number) % 7)
        timing = LegTiming(queue_s=3 * scale, compute_s=12 * scale)
        if role == "decode":
            timing = LegTiming(
                queue_s=scale, compute_s=4 * scale, kv_wait_s=scale, kv_hidden_s=6 * scale,
                kv_exposed_s=2 * scale, kv_bytes=round(1e9 * scale),
            )  # fmt: skip
        return [msgspec.structs.replace(output, timing=timing)]

    delay_s = 0.012 if role == "prefill" else 0.004
    return Script(answer=range(1000, 1040), delay_s=delay_s, tamper=tamper)


@asynccontextmanager
async def busy_gateway(num_prefill: int, num_decode: int) -> AsyncIterator[ScriptedCluster]:
    """Serve; one decode worker drains, one is full, one has blocks in quarantine."""
    model = load_served_model(resolve_model(""))
    cluster = ScriptedCluster(model)
    cluster.server.history = History(slot_s=SLOT_S)
    try:
        for role, number in (("prefill", num_prefill), ("decode", num_decode)):
            for index in range(number):
                worker = DressedWorker(
                    "prefill" if role == "prefill" else "decode",
                    _timed(role), name=f"{role}-{index}", model=model.name,
                )  # fmt: skip
                busy = (index * 5 + 3) % 11
                worker.figures = Figures(used=0.05 + 0.07 * busy, running=busy)
                await cluster.add(worker)
        if num_decode > 3:
            first, second, third = cluster.workers[num_prefill : num_prefill + 3]
            assert isinstance(first, DressedWorker)
            first.figures = Figures(0.98, 64, waiting=9)
            second.figures = replace(second.figures, draining=True)
            third.figures = replace(third.figures, quarantined=12)
        await cluster.start()
        yield cluster
    finally:
        await cluster.close()


async def keep_shown(cluster: ScriptedCluster) -> None:
    """Publish every worker's load ten times a second, as workers do."""
    while True:
        cluster.view.show(*cluster.workers)
        await asyncio.sleep(0.1)


async def send_requests(cluster: ScriptedCluster, number: int) -> None:
    """Whole answers, some of one token, four at a time, and one that is given up."""
    url = f"{cluster.url}/v1/completions"
    gate = asyncio.Semaphore(4)
    async with aiohttp.ClientSession() as session:

        async def send(index: int) -> None:
            tokens = (1, 8, 20, 36)[index % 4]
            body = {"prompt": SECRET * (1 + index % 5), "max_tokens": tokens, "ignore_eos": True}
            async with gate, session.post(url, json=body) as response:
                assert response.status == 200, await response.text()

        await asyncio.gather(*(send(index) for index in range(number)))
        body = {"prompt": SECRET, "max_tokens": 4000, "stream": True, "ignore_eos": True}
        async with session.post(url, json=body) as response:
            await response.content.readline()
