"""What a worker does between SIGTERM and its end."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from mesh.config import WorkerConfig
from mesh.messages import DataPlaneOffer
from mesh.service import process_epoch
from mesh.worker_info import LoadSnapshot
from tests.unit.engine.tiny_llama import TinyLlama
from tests.unit.mesh.until import until
from worker.drain import drain
from worker.host import WorkerHost
from worker.runtime import WorkerRuntime

IDLE = LoadSnapshot(
    kv_blocks_total=8,
    kv_blocks_free=8,
    kv_blocks_quarantined=0,
    open_transfers=0,
    running=0,
    waiting=0,
    queued_tokens=0,
    step_time_s=0.0,
    tokens_per_s=0.0,
)
LONG_S = 60.0


class IdleLoop:
    """A hot loop with nothing to do."""

    def handle(self, command: str) -> None:
        raise AssertionError(command)

    def take_events(self) -> list[str]:
        return []

    def step(self) -> tuple[list[str], bool]:
        return [], False

    def rest(self) -> None:
        pass


class Load:
    """A worker's load, set by the test; counts who looks."""

    def __init__(self, **held: int) -> None:
        self.looks = 0
        self.now = IDLE
        self.hold(**held)

    def hold(self, **held: int) -> None:
        self.now = msgspec.structs.replace(IDLE, **held)

    def __call__(self) -> LoadSnapshot:
        self.looks += 1
        return self.now

    async def looked(self, times: int) -> None:
        """Until it was asked this many times more."""
        target = self.looks + times
        await until(lambda: self.looks >= target)


@pytest.mark.parametrize("held", ["running", "waiting", "open_transfers"])
async def test_it_ends_when_the_last_work_has(held: str) -> None:
    load = Load(**{held: 1})
    draining = asyncio.create_task(drain(load, LONG_S, quiet_s=0))
    await load.looked(3)
    assert not draining.done()
    load.hold()
    assert await asyncio.wait_for(draining, 50)


async def test_work_that_comes_before_the_gateways_have_heard_is_done_too() -> None:
    load = Load()
    draining = asyncio.create_task(drain(load, LONG_S, quiet_s=0.3))
    await load.looked(1)
    load.hold(waiting=1)
    # More looks than the quiet time has.
    await load.looked(8)
    assert not draining.done()
    load.hold()
    assert await asyncio.wait_for(draining, 50)


async def test_it_gives_up_in_time(caplog: pytest.LogCaptureFixture) -> None:
    start_s = time.monotonic()
    assert not await drain(Load(running=2, waiting=1), 0.05)
    assert 0.05 <= time.monotonic() - start_s < 50
    assert "running=2 waiting=1" in caplog.text


class Worker:
    """A runtime over an idle loop; the registry is not there, which a worker survives."""

    def __init__(self, tiny_llama: TinyLlama, load: Load, drain_s: float) -> None:
        config = WorkerConfig(
            role="decode", worker_id="d", redis_url="redis://127.0.0.1:1", drain_s=drain_s
        )
        self.host = WorkerHost(
            config,
            tiny_llama.engine(role="decode"),
            epoch=process_epoch(),
            offer=DataPlaneOffer(transports=("tcp",), host_id=""),
            load=load,
            on_message=lambda peer_id, message: None,
            on_peer_down=lambda peer_id: None,
        )
        self.runtime: WorkerRuntime[str, str] = WorkerRuntime(
            IdleLoop(),
            self.host,
            on_events=lambda events: None,
            poll=lambda: False,
            poll_fileno=None,
            niceness=0,
            load=load,
            drain_s=drain_s,
        )
        self.stop = asyncio.Event()
        self.run = asyncio.create_task(self.runtime.run(self.stop))

    async def started(self) -> None:
        """Until its sockets are bound."""
        await until(lambda: not self.host.server.endpoint.endswith(":0"))


async def test_a_stopped_worker_says_so_and_serves_on_until_its_work_has_ended(
    tiny_llama: TinyLlama,
) -> None:
    load = Load(running=1)
    worker = Worker(tiny_llama, load, LONG_S)
    await worker.started()
    assert not worker.runtime.draining
    worker.stop.set()
    await load.looked(5)
    assert worker.runtime.draining
    assert not worker.run.done()
    load.hold()
    await asyncio.wait_for(worker.run, 50)


async def test_a_second_signal_stops_it_at_once(tiny_llama: TinyLlama) -> None:
    load = Load(running=1)
    worker = Worker(tiny_llama, load, LONG_S)
    await worker.started()
    worker.stop.set()
    await load.looked(5)
    worker.run.cancel()  # what mesh.service does at the second signal
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(worker.run, 50)


async def test_without_a_time_for_it_nothing_is_awaited(tiny_llama: TinyLlama) -> None:
    load = Load(running=1)
    worker = Worker(tiny_llama, load, 0)
    await worker.started()
    worker.stop.set()
    await asyncio.wait_for(worker.run, 50)
