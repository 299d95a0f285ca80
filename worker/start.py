"""Builds a worker's engine. Import this only after ``configure_threads``: it loads torch."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import threading
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from engine.backend import Backend
from engine.backends.gpu.device import CudaDevice
from engine.device import ON_CPU, DeviceKind, Placement, cpu_level
from engine.engine import Engine
from engine.gpu_memory.profile import CudaMeter, GpuCacheSizer
from engine.tensor_parallel.distributed_group import DistributedGroup
from engine.tensor_parallel.shard import check_divisible
from engine.warm_up import warm_up
from engine.weights.open import open_model
from mesh.config import Weights, WorkerConfig
from mesh.errors import ConfigError
from mesh.model_text.model_files import resolve_model
from worker.followers.follower_processes import FollowerProcesses
from worker.followers.rank_setup import RankSetup

if TYPE_CHECKING:
    from engine.backends.cpu.backend import WeightScheme
    from engine.backends.cpu.kernel_compiler import KernelCompiler

_INT4_BELOW_BITS = 5.25
"""Between llama.cpp's 4-bit files (Q4_K_M: 4.9 bits a weight) and its 5-bit ones (5.5 and more)."""
_INT8_BELOW_BITS = 12.0
"""Between 8-bit files and 16-bit ones, which a GPU holds as they are."""

_logger = logging.getLogger(__name__)


def start_followers(
    config: WorkerConfig, placement: Placement, module: str, reports: Any, epoch: int
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
    check_divisible(model, config.tensor_parallel, weight_scheme(config, placement.device))
    return FollowerProcesses(config, placement.device, module, reports, epoch)


async def start_engine(
    config: WorkerConfig, placement: Placement, followers: FollowerProcesses | None = None
) -> Engine:
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
            engine = build_engine(config, placement, followers)
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


def build_engine(
    config: WorkerConfig,
    placement: Placement = ON_CPU,
    followers: FollowerProcesses | None = None,
) -> Engine:
    """Load the model, allocate the cache and compile the kernels.

    Args:
        config: the worker's.
        placement: what it computes on.
        followers: the other ranks, with this one as rank 0; None: there are none.

    Raises:
        ConfigError: the model or a size is unusable.
    """
    start_s = time.monotonic()
    weights = weight_scheme(config, placement.device)
    config = msgspec.structs.replace(config, weights=weights)
    backend, sizer = _make_backend(config, placement.device, rank=0)
    with _compiling(config, placement.device, backend) as kernels:
        group = None if followers is None else followers.join(backend.device)
        engine = Engine(config, backend, group, sizer=sizer, placement=placement)
        if followers is not None:
            engine.broadcast = followers.broadcast
            engine.runner.prepare(engine.model)  # now, as every follower does
        engine.grammars.prepare()
        loaded_s = time.monotonic()
        if kernels is not None:
            kernels.wait()
    warm_up(engine)
    engine.group.expect_steps()
    _logger.info(
        "model ready device=%s level=%s weights=%s load_s=%.1f warm_up_s=%.1f",
        placement.device, cpu_level(placement.device) or "-", weights,
        loaded_s - start_s, time.monotonic() - loaded_s,
    )  # fmt: skip
    return engine


def build_rank(setup: RankSetup) -> Engine:
    """Load a follower's part of the model and allocate its part of the cache.

    Its kernels are rank 0's, which broadcasts no step before they are compiled.

    Raises:
        ConfigError: the model or a size is unusable, or the ranks did not find each other.
    """
    weights = weight_scheme(setup.config, setup.device)
    config = msgspec.structs.replace(setup.config, weights=weights)
    backend, sizer = _make_backend(config, setup.device, setup.rank)
    group = DistributedGroup(setup.rank, config.tensor_parallel, setup.port, backend.device)
    engine = Engine(config, backend, group, sizer=sizer)
    engine.runner.prepare(engine.model)
    return engine


def _make_backend(
    config: WorkerConfig, device: DeviceKind, rank: int
) -> tuple[Backend, GpuCacheSizer | None]:
    """What a rank computes with, and on a GPU what sizes its cache."""
    return _gpu_backend(config, rank) if device == "cuda" else (_cpu_backend(config), None)


def _cpu_backend(config: WorkerConfig) -> Backend:
    """Divides the cores among the ranks."""
    # Not at the top: they load numba, which a machine with a GPU need not have.
    from engine.backends.cpu.backend import CpuBackend
    from engine.backends.cpu.core_share import CoreShare

    size, weights = config.tensor_parallel, _cpu_scheme(config.weights)
    if config.threads:
        return CpuBackend(weights, max(1, config.threads // size))
    if size > 1 and not config.cores_file:
        return CpuBackend(weights, max(1, len(os.sched_getaffinity(0)) // size))
    return CpuBackend(weights, CoreShare(config.cores_file, config.role))


def _compiling(
    config: WorkerConfig, device: DeviceKind, backend: Backend
) -> AbstractContextManager[KernelCompiler | None]:
    """What compiles kernels meanwhile; None on a GPU, whose backend does it at its first steps."""
    if device == "cuda":
        return contextlib.nullcontext()
    from engine.backends.cpu.kernel_compiler import KernelCompiler  # late as in _cpu_backend

    kv_dtype = backend.default_kv_dtype if config.kv_dtype == "auto" else config.kv_dtype
    return KernelCompiler(_cpu_scheme(config.weights), kv_dtype)


def _gpu_backend(config: WorkerConfig, rank: int) -> tuple[Backend, GpuCacheSizer]:
    """On the rank's one of the placement's GPUs, which are all that CUDA sees.

    Raises:
        ConfigError: the driver and torch do not go together.
    """
    device = torch.device("cuda", rank)
    try:
        torch.cuda.mem_get_info(device)  # starts CUDA
    except (RuntimeError, AssertionError) as error:  # the latter: torch without CUDA
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device: torch {torch.__version__} cannot use CUDA: {reason}") from error
    # Not at the top: it loads triton, which a machine without a GPU need not have.
    module = importlib.import_module("engine.backends.gpu.backend")
    backend: Backend = module.GpuBackend(config.weights, CudaDevice(rank))
    return backend, GpuCacheSizer(config, CudaMeter(device))


def weight_scheme(config: WorkerConfig, device: DeviceKind = "cpu") -> Weights:
    """The configured scheme, or what holds the file's own precision; never ``auto``.

    On a CPU that cannot multiply bytes, fp32 is faster than either kind of quantised weights.

    Raises:
        ConfigError: the model is unusable, or a CPU does not compute with the scheme.
    """
    if config.weights != "auto":
        return config.weights if device == "cuda" else _cpu_scheme(config.weights)
    if device == "cpu":
        from engine.backends.cpu.level import LEVEL  # loads LLVM, as little as ``_cpu_backend``

        if not LEVEL.multiplies_bytes:
            return "fp32"
    _, source = open_model(resolve_model(config.model))
    with source:
        bits = source.bits_per_weight()
    if bits < _INT4_BELOW_BITS:
        return "int4"
    return "bf16" if device == "cuda" and bits > _INT8_BELOW_BITS else "int8"


def _cpu_scheme(weights: Weights) -> WeightScheme:
    match weights:
        case "fp32" | "int8" | "int4":
            return weights
        case _:
            raise ConfigError(f"weights: {weights} needs a GPU")
