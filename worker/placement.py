"""Where a worker runs: its device, and on a GPU the lease, held around everything else it does.

    choose the device ──> lease GPUs ──> CUDA_VISIBLE_DEVICES ──> serve ──> give back
                                                                    │
                                        lease lost: stop, drain <───┘

This must come before torch is imported: what CUDA sees is decided once in a process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable

from engine.device import ON_CPU, Placement, choose_device
from mesh.config import WorkerConfig
from mesh.errors import Unavailable
from mesh.gpus.choice import is_busy
from mesh.gpus.lease import LEASE_TTL_S, GpuLease, take_gpus
from mesh.gpus.lease_table import GpuLeaseTable, Holder, host_id
from mesh.gpus.nvml import read_topology
from mesh.gpus.topology import NO_GPUS, GpuTopology, visible
from mesh.registry.redis_client import open_blocking_redis
from mesh.telemetry import metrics
from mesh.worker_info import WorkerGpu

_VISIBLE = "CUDA_VISIBLE_DEVICES"

_logger = logging.getLogger(__name__)


def show_gpus(gpus: tuple[WorkerGpu, ...]) -> None:
    """One series a GPU, always 1; its NVLinks to the worker's GPUs in one label: ``0,450,450``."""
    info = metrics.gauge(
        "pdmesh:gpu_info", "A GPU of this worker.", ["uuid", "name", "memory_mib", "link_gb_s"]
    )
    for gpu in gpus:
        links = ",".join(map(str, gpu.link_gb_s))
        info.labels(gpu.uuid, gpu.name, str(gpu.memory_bytes >> 20), links).set(1)


async def run_placed(
    config: WorkerConfig, stop: asyncio.Event, serve: Callable[[Placement], Awaitable[None]]
) -> None:
    """Lease what the configuration asks for, serve, and give it back.

    Args:
        config: the worker's.
        stop: ends a wait for GPUs; set here if the lease is lost, so that the worker drains.
        serve: the worker; ends after ``stop``. Not called if ``stop`` comes before there is a GPU.

    Raises:
        ConfigError: the device is asked for and not there.
        Unavailable: no GPU became free in time, or the lease was lost while serving.
    """
    topology = NO_GPUS
    if config.device != "cpu":
        topology = visible(read_topology(), os.environ.get(_VISIBLE))
    if choose_device(config.device, topology) == "cpu":
        await serve(ON_CPU)
        return
    await _serve_leased(config, topology, stop, serve)


async def _serve_leased(
    config: WorkerConfig,
    topology: GpuTopology,
    stop: asyncio.Event,
    serve: Callable[[Placement], Awaitable[None]],
) -> None:
    loop = asyncio.get_running_loop()
    redis = open_blocking_redis(config.redis_url)
    holder = Holder(config.worker_id, time.time_ns(), config.num_gpu_sharers)
    table = GpuLeaseTable(redis, host_id(), holder, int(LEASE_TTL_S * 1000))
    cancelled = threading.Event()
    watch = asyncio.create_task(_set_after(stop, cancelled))
    try:
        uuids = await asyncio.to_thread(
            take_gpus, table, redis, topology, config.num_gpus,
            wait_s=config.gpu_wait_s, cancelled=cancelled,
        )  # fmt: skip
        if not uuids:
            return

        def on_lost() -> None:
            loop.call_soon_threadsafe(stop.set)

        lease = GpuLease(table, uuids, on_lost)
        try:
            if holder.slots == 1:
                _warn_of_strangers(uuids)
            await serve(_place(topology.subset(uuids)))
        finally:
            await asyncio.to_thread(lease.close)
        if lease.lost is not None:
            raise Unavailable(f"left the GPU to {lease.lost.worker_id}, which leases it now")
    finally:
        cancelled.set()
        watch.cancel()
        redis.close()


def _warn_of_strangers(uuids: tuple[str, ...]) -> None:
    """Say what is in use on GPUs that this worker should have for itself."""
    for gpu in read_topology().gpus:  # again: what was in use before a wait may be free now
        if gpu.uuid in uuids and is_busy(gpu):
            used_gib = gpu.used_bytes / (1 << 30)
            _logger.warning("%s has %.1f GiB in use by others without a lease", gpu.uuid, used_gib)


def _place(gpus: GpuTopology) -> Placement:
    """Make CUDA see these GPUs and no others, from now on and in child processes."""
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), "CUDA has its GPUs already"
    os.environ[_VISIBLE] = ",".join(gpu.uuid for gpu in gpus.gpus)
    uuids = " ".join(gpu.uuid for gpu in gpus.gpus)
    _logger.info("leased %s: %s", gpus.describe(), uuids)
    return Placement("cuda", gpus)


async def _set_after(stop: asyncio.Event, cancelled: threading.Event) -> None:
    await stop.wait()
    cancelled.set()
