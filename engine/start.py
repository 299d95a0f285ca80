"""Builds a worker's engine. Import this only after ``configure_threads``: it loads torch."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from typing import Any

import msgspec

from engine.backends.cpu.backend import CpuBackend, WeightScheme
from engine.backends.cpu.core_share import CoreShare
from engine.engine import Engine
from engine.tensor_parallel.distributed_group import DistributedGroup
from engine.tensor_parallel.follower_processes import FollowerProcesses
from engine.tensor_parallel.rank_setup import RankSetup
from engine.tensor_parallel.shard import check_divisible
from engine.warm_up import warm_up
from engine.weights import open_model
from mesh.config import WorkerConfig
from mesh.model_files import resolve_model

_INT4_BELOW_BITS = 5.25
"""Between llama.cpp's 4-bit files (Q4_K_M: 4.9 bits a weight) and its 5-bit ones (5.5 and more)."""

_logger = logging.getLogger(__name__)


def start_followers(
    config: WorkerConfig, module: str, reports: Any, epoch: int
) -> FollowerProcesses | None:
    """Start the processes of the other ranks, if the worker has any; the caller closes them.

    For the main thread. Arguments as of ``FollowerProcesses``.

    Raises:
        ConfigError: the model is unusable, or can't be divided so.
    """
    if config.tensor_parallel == 1:
        return None
    # Here rather than in every rank at once: the error is for people.
    model, source = open_model(resolve_model(config.model))
    source.close()
    check_divisible(model, config.tensor_parallel, weight_scheme(config))
    return FollowerProcesses(config, module, reports, epoch)


async def start_engine(config: WorkerConfig, followers: FollowerProcesses | None = None) -> Engine:
    """``build_engine`` beside the event loop, in a thread that ends with it.

    A thread that has computed keeps its OpenMP team for as long as it lives. A second team makes
    OpenMP count more threads than cores and put idle ones to sleep at once, which doubles a step.

    Raises:
        ConfigError: as ``build_engine``.
        RankLost: a follower has ended.
    """
    loop = asyncio.get_running_loop()
    built: asyncio.Future[Engine] = loop.create_future()

    def report(engine: Engine | None, error: BaseException | None) -> None:
        if built.done():
            return
        if error is not None:
            built.set_exception(error)
        elif engine is not None:
            built.set_result(engine)

    def build() -> None:
        try:
            engine = build_engine(config, followers)
        except BaseException as error:
            loop.call_soon_threadsafe(report, None, error)
        else:
            loop.call_soon_threadsafe(report, engine, None)

    threading.Thread(target=build, name="build", daemon=True).start()
    if followers is None:
        return await built
    await asyncio.wait((built, followers.lost), return_when=asyncio.FIRST_COMPLETED)
    if followers.lost.done():
        followers.lost.result()
    engine = built.result()
    await followers.ready(engine.fingerprint)
    return engine


def build_engine(config: WorkerConfig, followers: FollowerProcesses | None = None) -> Engine:
    """Load the model, allocate the cache and compile the kernels; with followers, as rank 0.

    Raises:
        ConfigError: the model or a size is unusable.
    """
    start_s = time.monotonic()
    weights = weight_scheme(config)
    config = msgspec.structs.replace(config, weights=weights)
    backend = _make_backend(config, weights)
    if followers is None:
        engine = Engine(config, backend)
    else:
        engine = Engine(config, backend, followers.join(backend.device))
        engine.announce = followers.announce
    engine.constrainer.prepare()
    loaded_s = time.monotonic()
    warm_up(engine)
    engine.group.expect_steps()
    _logger.info(
        "model ready weights=%s load_s=%.1f warm_up_s=%.1f",
        weights, loaded_s - start_s, time.monotonic() - loaded_s,
    )  # fmt: skip
    return engine


def build_rank(setup: RankSetup) -> Engine:
    """Load a follower's part of the model and allocate its part of the cache.

    Raises:
        ConfigError: the model or a size is unusable, or the ranks did not find each other.
    """
    weights = weight_scheme(setup.config)
    config = msgspec.structs.replace(setup.config, weights=weights)
    backend = _make_backend(config, weights)
    group = DistributedGroup(setup.rank, config.tensor_parallel, setup.port, backend.device)
    return Engine(config, backend, group)


def _make_backend(config: WorkerConfig, weights: WeightScheme) -> CpuBackend:
    """What this rank computes with; the cores are divided among the ranks."""
    size = config.tensor_parallel
    if config.threads:
        return CpuBackend(weights, max(1, config.threads // size))
    if size > 1 and not config.cores_file:
        return CpuBackend(weights, max(1, len(os.sched_getaffinity(0)) // size))
    return CpuBackend(weights, CoreShare(config.cores_file, config.role))


def weight_scheme(config: WorkerConfig) -> WeightScheme:
    """The configured scheme, or what holds the file's own precision.

    Raises:
        ConfigError: the model is unusable.
    """
    if config.weights != "auto":
        return config.weights
    _, source = open_model(resolve_model(config.model))
    with source:
        return "int4" if source.bits_per_weight() < _INT4_BELOW_BITS else "int8"
