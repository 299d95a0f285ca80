"""A worker's lease of GPUs: taken before CUDA starts, kept by a thread, given back at the end.

    wait for free GPUs ──> take the best at once ──> take them again every 2 s ──> release
                                                       │
           another worker's name on it: on_lost <──────┘

The lease lasts as long as the process, busy or hung, since so does its use of the GPU's memory:
hence a thread and not the event loop. A process that dies leaves its GPUs to others after
``LEASE_TTL_S``.

Redis lost: workers compute on, and take their leases again when it is back. A registry that has
just started may not have heard of them yet, so nobody takes a GPU from it in its first seconds.
A worker that finds its lease taken (it was silent for the lease's life, or Redis lost the key) has
to leave the GPU: the registry's word stands.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from redis import Redis

from mesh.errors import ConfigError, Unavailable
from mesh.gpus.choice import choose_gpus
from mesh.gpus.lease_table import GpuLeaseTable, Holder
from mesh.gpus.topology import GpuTopology
from mesh.registry.redis_client import REDIS_ERRORS
from mesh.telemetry.rate_limited_log import RateLimitedLog

LEASE_TTL_S = 10.0
RENEW_S = 2.0
SETTLE_S = 5.0
"""Within this time of Redis' start every living worker has taken its lease again: ``RENEW_S``, the
client's time-out of 2 s, and a second because Redis tells its age in whole ones."""
_RETRY_S = 0.5

_logger = logging.getLogger(__name__)


def take_gpus(
    table: GpuLeaseTable,
    redis: Redis,
    topology: GpuTopology,
    count: int,
    *,
    wait_s: float,
    cancelled: threading.Event,
    settle_s: float = SETTLE_S,
) -> tuple[str, ...]:
    """Lease the best free GPUs, waiting until there are enough.

    Args:
        table: in whose name.
        redis: the table's server.
        topology: GPUs that may be taken.
        count: how many.
        wait_s: longest wait for Redis and for free GPUs.
        cancelled: ends the wait.
        settle_s: least age of the server.

    Returns:
        UUIDs in PCI order; empty if cancelled.

    Raises:
        ConfigError: there are fewer GPUs than that, taken or not.
        Unavailable: too few became free, or Redis did not answer; names who holds them.
    """
    if count > len(topology.gpus):
        raise ConfigError(f"device: {count} GPUs wanted, and there are {topology.describe()}")
    uuids = [gpu.uuid for gpu in topology.gpus]
    deadline_s = time.monotonic() + wait_s
    why = told = ""
    while not cancelled.is_set():
        outrun = False
        try:
            if _age_s(redis) >= settle_s:
                held = table.holders(uuids)
                chosen = choose_gpus(topology, table.num_holders(held), count)
                if chosen:
                    winner = table.take(chosen)
                    if winner is None:
                        return chosen
                    if winner.worker_id == table.holder.worker_id:
                        raise Unavailable(f"a later start of {winner.worker_id} leases the GPU")
                    outrun = True
                why = _taken(topology, held, count)
            else:
                why = "Redis has just started"
        except REDIS_ERRORS as error:
            why = f"Redis, which leases them, does not answer: {error}"
        pause_s = 0.0 if outrun else _RETRY_S
        if time.monotonic() + pause_s > deadline_s:
            raise Unavailable(f"no GPU after {wait_s:g} s: {why}")
        if why != told and not outrun:
            _logger.info("waiting for a GPU: %s", why)
            told = why
        cancelled.wait(pause_s)
    return ()


class GpuLease:
    """GPUs that are leased until ``close()``; ``lost`` says that they no longer are."""

    def __init__(
        self,
        table: GpuLeaseTable,
        uuids: Sequence[str],
        on_lost: Callable[[], None],
        *,
        renew_s: float = RENEW_S,
    ) -> None:
        """Keep what ``take_gpus`` took.

        Args:
            table: which took them.
            uuids: what it took.
            on_lost: called once, from the keeping thread.
            renew_s: pause between renewals, a fraction of the lease's life.
        """
        self._table = table
        self._uuids = tuple(uuids)
        self._on_lost = on_lost
        self._renew_s = renew_s
        self._closed = threading.Event()
        self._lost_log = RateLimitedLog(_logger)
        self.lost: Holder | None = None
        """Who leases one of the GPUs instead."""
        self._thread = threading.Thread(target=self._keep, name="gpu-lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give the GPUs back; blocks for a few round trips. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        try:
            self._table.release(self._uuids)
        except REDIS_ERRORS as error:
            _logger.warning("could not give GPUs back, the lease will expire: %s", error)

    def _keep(self) -> None:
        while not self._closed.wait(self._renew_s):
            try:
                self.lost = self._table.take(self._uuids)
            except REDIS_ERRORS as error:
                self._lost_log.warning("registry lost, computing on without a lease: %s", error)
                continue
            if self.lost is not None:
                _logger.error("GPU leased by %s now, leaving it", self.lost.worker_id)
                self._on_lost()
                return


def _age_s(redis: Redis) -> float:
    info: Mapping[str, object] = redis.info("server")
    age = info.get("uptime_in_seconds")
    # A server that does not tell its age is a hosted one: not started beside the workers.
    return float(age) if isinstance(age, int) else float("inf")


def _taken(topology: GpuTopology, held: Mapping[str, Sequence[Holder]], count: int) -> str:
    """Who has what, and what can be done."""
    names = {gpu.uuid: f"{gpu.uuid} ({gpu.name})" for gpu in topology.gpus}
    leases = [
        f"{names[uuid]} by {' and '.join(holder.worker_id for holder in holders)}"
        for uuid, holders in held.items()
        if holders
    ]
    return (
        f"{count} wanted of {len(names)}, leased are {', '.join(leases) or 'none'}; "
        "stop a worker, or let all of them share with --gpu-slots"
    )
