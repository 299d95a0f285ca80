"""Leases of GPUs over a real Valkey: races, expiry, take-over, release, the loss of Redis."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from redis import Redis

from cli.embedded_valkey import EmbeddedValkey
from mesh.errors import ConfigError, Unavailable
from mesh.gpus.lease import GpuLease, take_gpus
from mesh.gpus.lease_table import GpuLeaseTable, Holder, host_id
from mesh.gpus.topology import GpuTopology
from mesh.registry.redis_client import open_blocking_redis
from tests.unit.mesh.gpu_hosts import bridged_a100, dgx_h100, host

HOST = "boot-1"
ONE = host(1)
GPU = ONE.gpus[0].uuid


@pytest.fixture
def redis(valkey: EmbeddedValkey) -> Iterator[Redis]:
    client = open_blocking_redis(valkey.url)
    yield client
    client.close()


def table(
    redis: Redis, worker_id: str, epoch: int = 5, slots: int = 1, life_ms: int = 10_000
) -> GpuLeaseTable:
    return GpuLeaseTable(redis, HOST, Holder(worker_id, epoch, slots), life_ms)


def take(
    leases: GpuLeaseTable, redis: Redis, topology: GpuTopology, count: int = 1, wait_s: float = 0.0
) -> tuple[str, ...]:
    return take_gpus(
        leases, redis, topology, count, wait_s=wait_s, cancelled=threading.Event(), settle_s=0.0
    )


@contextmanager
def kept(leases: GpuLeaseTable, uuids: tuple[str, ...]) -> Iterator[GpuLease]:
    lease = GpuLease(leases, uuids, lambda: None, renew_s=0.05)
    try:
        yield lease
    finally:
        lease.close()


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not come about"
        time.sleep(0.005)


def leased_by(redis: Redis, uuid: str) -> list[str]:
    # As seen by a worker that holds nothing.
    return sorted(holder.worker_id for holder in table(redis, "-").holders([uuid])[uuid])


def test_all_processes_of_a_machine_have_one_host_id() -> None:
    assert host_id() == host_id()
    assert len(host_id()) == 36


def test_each_of_many_that_race_gets_a_gpu_of_its_own(valkey: EmbeddedValkey) -> None:
    start = threading.Barrier(8)

    def worker(number: int) -> tuple[str, ...]:
        client = open_blocking_redis(valkey.url)
        try:
            start.wait()
            return take(table(client, f"d{number}"), client, dgx_h100(), wait_s=5.0)
        finally:
            client.close()

    with ThreadPoolExecutor(8) as pool:
        taken = [uuid for uuids in pool.map(worker, range(8)) for uuid in uuids]
    assert Counter(taken) == {gpu.uuid: 1 for gpu in dgx_h100().gpus}


def test_racing_pairs_never_get_half(valkey: EmbeddedValkey, redis: Redis) -> None:
    start = threading.Barrier(3)

    def worker(number: int) -> tuple[str, ...]:
        client = open_blocking_redis(valkey.url)
        try:
            start.wait()
            return take(table(client, f"d{number}"), client, bridged_a100(), 2, wait_s=0.6)
        except Unavailable:
            return ()
        finally:
            client.close()

    with ThreadPoolExecutor(3) as pool:
        taken = [uuids for uuids in pool.map(worker, range(3)) if uuids]
    uuids = [gpu.uuid for gpu in bridged_a100().gpus]
    assert sorted(taken) == [(uuids[0], uuids[2]), (uuids[1], uuids[3])], "the bridged pairs"
    assert len(redis.keys("pdmesh:gpu:*")) == 4, "the third took nothing, not even for a moment"


def test_nothing_free_is_refused_with_the_names(redis: Redis) -> None:
    assert take(table(redis, "d0"), redis, ONE) == (GPU,)
    with pytest.raises(Unavailable, match=rf"after 0 s: 1 wanted of 1.*{GPU} \(.*\) by d0;.*slots"):
        take(table(redis, "d1"), redis, ONE)
    with pytest.raises(ConfigError, match="device: 2 GPUs wanted, and there are 1 x NVIDIA A100"):
        take(table(redis, "d1"), redis, ONE, 2)


def test_a_wait_ends_with_a_release(redis: Redis) -> None:
    first = table(redis, "d0")
    take(first, redis, ONE)
    timer = threading.Timer(0.2, first.release, [[GPU]])
    timer.start()
    assert take(table(redis, "d1"), redis, ONE, wait_s=60.0) == (GPU,)
    timer.join()
    assert leased_by(redis, GPU) == ["d1"]
    first.release([GPU])
    assert leased_by(redis, GPU) == ["d1"], "nobody gives back what another holds"


def test_a_wait_can_be_cancelled(redis: Redis) -> None:
    take(table(redis, "d0"), redis, ONE)
    cancelled = threading.Event()
    threading.Timer(0.1, cancelled.set).start()
    found = take_gpus(
        table(redis, "d1"), redis, ONE, 1, wait_s=60.0, cancelled=cancelled, settle_s=0.0
    )
    assert found == ()


def test_a_kept_lease_outlives_its_life_and_ends_with_its_worker(redis: Redis) -> None:
    leases = table(redis, "d0", life_ms=1500)
    with kept(leases, take(leases, redis, ONE)) as lease:
        time.sleep(2.5)
        assert leased_by(redis, GPU) == ["d0"]
    assert redis.keys("pdmesh:gpu:*") == []
    lease.close()


def test_the_gpu_of_a_dead_worker_is_free_after_the_leases_life(redis: Redis) -> None:
    started_s = time.monotonic()
    take(table(redis, "d0", life_ms=300), redis, ONE)  # and nobody renews it
    assert take(table(redis, "d1"), redis, ONE, wait_s=60.0) == (GPU,)
    assert time.monotonic() - started_s > 0.2


def test_a_restarted_worker_takes_over_at_once_and_the_earlier_start_leaves(redis: Redis) -> None:
    lost: list[str] = []
    old = table(redis, "d0", epoch=5)
    lease = GpuLease(old, take(old, redis, ONE), lambda: lost.append("old"), renew_s=0.05)
    new = table(redis, "d0", epoch=6)
    assert take(new, redis, ONE) == (GPU,)
    until(lambda: lost)
    assert lease.lost == Holder("d0", 6, 1)
    lease.close()
    assert new.take([GPU]) is None, "the earlier start gave back nothing of the later one's"
    assert old.take([GPU]) == Holder("d0", 6, 1)
    with pytest.raises(Unavailable, match="a later start of d0"):
        take(old, redis, ONE)


def test_a_worker_that_was_silent_too_long_leaves_the_gpu_to_the_next(redis: Redis) -> None:
    lost: list[bool] = []
    leases = table(redis, "d0", life_ms=100)
    lease = GpuLease(leases, take(leases, redis, ONE), lambda: lost.append(True), renew_s=0.4)
    assert take(table(redis, "d1"), redis, ONE, wait_s=60.0) == (GPU,)
    until(lambda: lost)
    assert lease.lost == Holder("d1", 5, 1)
    lease.close()
    assert leased_by(redis, GPU) == ["d1"]


def test_a_lost_redis_costs_no_lease(valkey: EmbeddedValkey, redis: Redis) -> None:
    leases = table(redis, "d0")
    with kept(leases, take(leases, redis, ONE)) as lease:
        valkey.child.kill()
        with pytest.raises(Unavailable, match="Redis, which leases them, does not answer"):
            take(table(redis, "d1"), redis, ONE)
        valkey.child.start()
        # An empty server: the one that computes comes first, who waits for it to settle second.
        with pytest.raises(Unavailable, match="Redis has just started"):
            take_gpus(table(redis, "d1"), redis, ONE, 1, wait_s=0.6, settle_s=60.0,
                      cancelled=threading.Event())  # fmt: skip
        until(lambda: leased_by(redis, GPU) == ["d0"])
        assert lease.lost is None


def test_workers_that_share_fill_a_gpu_to_its_slots(redis: Redis) -> None:
    two = host(2)
    uuids = [gpu.uuid for gpu in two.gpus]
    sharers = [table(redis, f"d{i}", slots=2) for i in range(5)]
    assert [take(sharer, redis, two) for sharer in sharers[:4]] == [
        (uuids[0],), (uuids[1],), (uuids[0],), (uuids[1],),
    ]  # fmt: skip
    assert leased_by(redis, uuids[0]) == ["d0", "d2"]
    with pytest.raises(Unavailable, match=r"by d0 and d2, .* by d1 and d3"):
        take(sharers[4], redis, two)
    assert sharers[2].take([uuids[0]]) is None, "it keeps its place"
    sharers[0].release([uuids[0]])
    assert take(sharers[4], redis, two) == (uuids[0],)


def test_nobody_shares_with_one_who_does_not(redis: Redis) -> None:
    alone, sharer = table(redis, "d0"), table(redis, "d1", slots=2)
    assert alone.take([GPU]) is None
    assert sharer.take([GPU]) == Holder("d0", 5, 1)
    with pytest.raises(Unavailable):
        take(sharer, redis, ONE)
    alone.release([GPU])
    assert sharer.take([GPU]) is None
    assert alone.take([GPU]) == Holder("d1", 5, 2)
    # A worker that restarts with another number of slots follows the same rule.
    again = table(redis, "d1", epoch=6, slots=1)
    assert again.take([GPU]) is None
    assert sharer.take([GPU]) == Holder("d1", 6, 1)


@pytest.mark.parametrize("bad", [b"", b"x", b"1 2", b"\xff\xfe\xfd", b"1 5 " + b"w" * 5000])
def test_a_value_that_nobody_of_ours_wrote_blocks_and_breaks_nothing(
    redis: Redis, bad: bytes
) -> None:
    (key, *_) = table(redis, "-")._keys(GPU)
    redis.set(key, bad, px=60_000)
    if bad.startswith(b"1 5 "):
        bad_id = "w" * 5000
        assert leased_by(redis, GPU)[0] in bad_id
    with pytest.raises(Unavailable):
        take(table(redis, "d0"), redis, ONE)
    redis.delete(key)
    assert take(table(redis, "d0"), redis, ONE) == (GPU,)
