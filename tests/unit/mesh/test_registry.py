"""The registry over a real Valkey: joining, load, leaving, expiry, restarts of either side."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import msgspec
import pytest
from redis.asyncio import Redis

from cli.embedded_valkey import EmbeddedValkey
from mesh.errors import ConfigError
from mesh.registry.keys import (
    HEARTBEAT_S,
    HEARTBEAT_TTL_S,
    MAX_VALUE_BYTES,
    WORKERS_KEY,
    decode_value,
    encode_value,
    worker_key,
)
from mesh.registry.registration import Registration
from mesh.registry.view import ClusterView
from mesh.worker_info import LoadSnapshot, WorkerGpu, WorkerInfo
from tests.unit.loop_lag import watched_loop
from tests.unit.mesh.until import until


def info(worker_id: str = "p0", epoch: int = 5) -> WorkerInfo:
    return WorkerInfo(
        worker_id=worker_id,
        role="prefill",
        epoch=epoch,
        endpoint="tcp://127.0.0.1:1",
        http_endpoint="http://127.0.0.1:2",
        fingerprint="f",
        model="m",
        max_model_len=2048,
        block_size=16,
        kv_blocks_total=100,
        max_num_seqs=8,
        transport="ucx",
    )


def load(running: int = 0) -> LoadSnapshot:
    return LoadSnapshot(
        kv_blocks_total=100,
        kv_blocks_free=90,
        kv_blocks_quarantined=0,
        open_transfers=0,
        running=running,
        waiting=0,
        queued_tokens=0,
        step_time_s=0.01,
        tokens_per_s=100.0,
    )


@asynccontextmanager
async def running(*parts: ClusterView | Registration) -> AsyncIterator[None]:
    for part in parts:
        await part.start()
    try:
        yield
    finally:
        for part in reversed(parts):
            await part.close()


def ids(view: ClusterView) -> list[tuple[str, int]]:
    return sorted((entry.info.worker_id, entry.info.epoch) for entry in view.workers())


async def test_a_worker_appears_with_its_load_and_leaves_at_once(valkey: EmbeddedValkey) -> None:
    changes: list[list[tuple[str, int]]] = []
    view = ClusterView(valkey.url, on_change=lambda: changes.append(ids(view)))
    num_running = 0
    registration = Registration(valkey.url, info(), lambda: load(num_running))
    async with running(view):
        await until(lambda: view.redis_up)
        await registration.start()
        await until(lambda: view.workers())
        num_running = 3
        await until(lambda: view.workers()[0].load == load(3))
        assert view.workers()[0].info == info()
        await registration.close()
        closed_s = time.monotonic()
        async with watched_loop() as lag:
            await until(lambda: not view.workers())
        expires_s = HEARTBEAT_TTL_S - HEARTBEAT_S
        assert time.monotonic() - closed_s < expires_s + 10 * lag.worst_s
        assert changes == [[("p0", 5)], []]
    client = Redis.from_url(valkey.url)
    assert await client.keys("*") == [], "a worker that left leaves nothing in Redis"
    await client.aclose()


async def test_a_view_that_starts_later_reads_what_is_there(valkey: EmbeddedValkey) -> None:
    registrations = [Registration(valkey.url, info(f"p{i}"), load) for i in range(20)]
    async with running(*registrations):
        await until(lambda: all(r.redis_up for r in registrations))
        view = ClusterView(valkey.url)
        async with running(view):
            await until(lambda: len(view.workers()) == 20)
            assert all(entry.load == load() for entry in view.workers())


async def test_a_worker_that_died_expires(valkey: EmbeddedValkey) -> None:
    view = ClusterView(valkey.url)
    registration = Registration(valkey.url, info(), load)
    async with running(view):
        await registration.start()
        await until(lambda: view.workers())
        assert registration._task is not None
        registration._task.cancel()  # as kill -9 would: no farewell
        await until(lambda: not view.workers())
        await registration.close()


async def test_a_restarted_worker_takes_its_place_over(
    valkey: EmbeddedValkey, caplog: pytest.LogCaptureFixture
) -> None:
    view = ClusterView(valkey.url)
    old = Registration(valkey.url, info(epoch=5), lambda: load(5))
    new = Registration(valkey.url, info(epoch=6), lambda: load(6))
    async with running(view, old):
        await until(lambda: ids(view) == [("p0", 5)])
        async with running(new):
            await until(lambda: ids(view) == [("p0", 6)])
            with caplog.at_level(logging.ERROR):
                await until(lambda: "later start" in caplog.text)
            await until(lambda: view.workers()[0].load == load(6))
            # The old start's farewell must not remove the new one.
            await old.close()
            await asyncio.sleep(0.3)
            assert ids(view) == [("p0", 6)]


async def test_a_failing_load_callback_does_not_end_the_registration(
    valkey: EmbeddedValkey, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [load(1), None, load(2)]

    def next_load() -> LoadSnapshot:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is None:
            raise RuntimeError("census bug")
        return answer

    view = ClusterView(valkey.url)
    async with running(view, Registration(valkey.url, info(), next_load)):
        await until(lambda: [entry.load for entry in view.workers()] == [load(2)])
    assert "census bug" in caplog.text


async def test_both_sides_survive_the_loss_of_redis(valkey: EmbeddedValkey) -> None:
    view = ClusterView(valkey.url)
    registration = Registration(valkey.url, info(), load)
    changes: list[int] = []
    async with running(view, registration):
        await until(lambda: view.workers())
        valkey.child.kill()
        await until(lambda: not view.redis_up and not registration.redis_up)
        assert ids(view) == [("p0", 5)], "the view keeps its last content"
        view._on_change = lambda: changes.append(len(view.workers()))
        valkey.child.start()
        await until(lambda: view.redis_up and registration.redis_up)
        await asyncio.sleep(1.5)
        assert ids(view) == [("p0", 5)]
        assert changes == [], "an empty server that came back is no news about the workers"
        client = Redis.from_url(valkey.url)
        assert await client.exists(worker_key("p0"))
        await client.aclose()


async def test_both_sides_start_and_close_without_redis(valkey: EmbeddedValkey) -> None:
    valkey.child.kill()
    view = ClusterView(valkey.url)
    async with running(view, Registration(valkey.url, info(), load)):
        await asyncio.sleep(0.1)
        assert not view.redis_up
        assert view.workers() == []


@pytest.mark.parametrize(
    "bad",
    [b"", b"\xc1", msgspec.msgpack.encode({"worker_id": "p9"}), b"x" * (MAX_VALUE_BYTES + 1)],
    ids=["empty", "no-msgpack", "fields-missing", "too-large"],
)
async def test_a_bad_value_hides_no_other_worker(valkey: EmbeddedValkey, bad: bytes) -> None:
    async def write(client: Redis) -> None:
        await client.set(worker_key("a-bad"), bad)
        await _int(client.sadd(WORKERS_KEY, "a-bad"))
        await client.publish("pdmesh:load", bad)
        await client.publish("pdmesh:member", bad)

    view = ClusterView(valkey.url)
    client = Redis.from_url(valkey.url)
    async with running(view):
        await write(client)
        async with running(Registration(valkey.url, info(), load)):
            await until(lambda: ids(view) == [("p0", 5)])
            await write(client)
            await asyncio.sleep(0.1)
            assert view.redis_up
    await client.aclose()


async def _int(result: Awaitable[int] | int) -> int:
    return result if isinstance(result, int) else await result


def test_a_worker_that_tells_of_no_device_computes_on_a_cpu() -> None:
    fields = msgspec.to_builtins(info())
    del fields["device"], fields["gpus"]  # as versions did that knew no GPU
    del fields["cpu_level"]
    found = decode_value(msgspec.msgpack.encode(fields), WorkerInfo)
    assert (found.device, found.gpus, found.cpu_level) == ("cpu", (), "")


def test_a_worker_tells_of_its_gpus() -> None:
    gpu = WorkerGpu(uuid="GPU-1", name="NVIDIA H100", memory_bytes=80 << 30, link_gb_s=(0,))
    told = msgspec.structs.replace(info(), device="cuda", gpus=(gpu,))
    assert decode_value(encode_value(told), WorkerInfo) == told


def test_a_malformed_url_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="redis_url"):
        ClusterView("http://example")
