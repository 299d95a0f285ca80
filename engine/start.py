"""Builds a worker's engine. Import this only after ``configure_threads``: it loads torch."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import msgspec
import torch

from engine.backends.cpu.backend import CpuBackend, WeightScheme
from engine.backends.cpu.core_share import CoreShare
from engine.engine import Engine
from engine.gpu_profile import CudaMeter, GpuCacheSizer
from engine.placement import ON_CPU, Placement
from engine.warm_up import warm_up
from engine.weights import open_model
from mesh.config import Weights, WorkerConfig
from mesh.errors import ConfigError
from mesh.model_files import resolve_model

_INT4_BELOW_BITS = 5.25
"""Between llama.cpp's 4-bit files (Q4_K_M: 4.9 bits a weight) and its 5-bit ones (5.5 and more)."""
_INT8_BELOW_BITS = 12.0
"""Between 8-bit files (Q8_0: 8.5) and 16-bit ones."""

_logger = logging.getLogger(__name__)


async def start_engine(config: WorkerConfig, placement: Placement) -> Engine:
    """``build_engine`` beside the event loop, in a thread that ends with it.

    A thread that has computed keeps its OpenMP team for as long as it lives. A second team makes
    OpenMP count more threads than cores and put idle ones to sleep at once, which doubles a step.

    Raises:
        ConfigError: as ``build_engine``.
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
            engine = build_engine(config, placement)
        except BaseException as error:
            loop.call_soon_threadsafe(report, None, error)
        else:
            loop.call_soon_threadsafe(report, engine, None)

    threading.Thread(target=build, name="build", daemon=True).start()
    return await built


def build_engine(config: WorkerConfig, placement: Placement = ON_CPU) -> Engine:
    """Load the model, allocate the cache and compile the kernels.

    Args:
        config: the worker's.
        placement: what it computes on.

    Raises:
        ConfigError: the model or a size is unusable.
    """
    start_s = time.monotonic()
    if placement.device == "cuda":
        config = msgspec.structs.replace(config, weights=gpu_weight_scheme(config))
        engine = _gpu_engine(config, placement)
    else:
        weights = weight_scheme(config)
        config = msgspec.structs.replace(config, weights=weights)
        share = CoreShare(config.cores_file, config.role)
        engine = Engine(config, CpuBackend(weights, config.threads or share))
    engine.constrainer.prepare()
    loaded_s = time.monotonic()
    warm_up(engine)
    _logger.info(
        "model ready device=%s weights=%s load_s=%.1f warm_up_s=%.1f",
        placement.device, config.weights, loaded_s - start_s, time.monotonic() - loaded_s,
    )  # fmt: skip
    return engine


def _gpu_engine(config: WorkerConfig, placement: Placement) -> Engine:
    """An engine on the first of the placement's GPUs, which CUDA is to start on here.

    Raises:
        ConfigError: the driver and torch do not go together, or the model does not fit.
    """
    try:
        torch.cuda.mem_get_info(0)  # starts CUDA
    except (RuntimeError, AssertionError) as error:  # the latter: torch without CUDA
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device: torch {torch.__version__} cannot use CUDA: {reason}") from error
    # Late: it loads triton, which a machine without a GPU need not have.
    from engine.backends.gpu.backend import GpuBackend

    assert config.weights != "auto"
    backend = GpuBackend(config.weights)
    sizer = GpuCacheSizer(config, CudaMeter(backend.device))
    return Engine(config, backend, sizer=sizer, placement=placement)


def weight_scheme(config: WorkerConfig) -> WeightScheme:
    """The configured scheme, or what holds the file's own precision.

    Raises:
        ConfigError: the model is unusable, or a CPU does not compute with the scheme.
    """
    match config.weights:
        case "bf16" | "fp16" | "w8a8":
            raise ConfigError(f"weights: {config.weights} needs a GPU")
        case "fp32" | "int8" | "int4":
            return config.weights
    return "int4" if _bits_per_weight(config) < _INT4_BELOW_BITS else "int8"


def gpu_weight_scheme(config: WorkerConfig) -> Weights:
    """The same on a GPU, which has 16-bit arithmetic too.

    Raises:
        ConfigError: the model is unusable.
    """
    if config.weights != "auto":
        return config.weights
    bits = _bits_per_weight(config)
    return "int4" if bits < _INT4_BELOW_BITS else "int8" if bits < _INT8_BELOW_BITS else "bf16"


def _bits_per_weight(config: WorkerConfig) -> float:
    _, source = open_model(resolve_model(config.model))
    with source:
        return source.bits_per_weight()
