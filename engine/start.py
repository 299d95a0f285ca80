"""Builds a worker's engine. Import this only after ``configure_threads``: it loads torch."""

from __future__ import annotations

import logging
import os
import time

from engine.backends.cpu.backend import CpuBackend
from engine.engine import Engine
from mesh.config import WorkerConfig

_logger = logging.getLogger(__name__)


def build_engine(config: WorkerConfig) -> Engine:
    """Load the model, allocate the cache and compile the kernels.

    Raises:
        ConfigError: the model or a size is unusable.
    """
    start_s = time.monotonic()
    threads = config.threads or len(os.sched_getaffinity(0))
    engine = Engine(config, CpuBackend(config.weights, threads))
    loaded_s = time.monotonic()
    engine.warm_up()
    _logger.info(
        "model ready load_s=%.1f warm_up_s=%.1f threads=%d",
        loaded_s - start_s, time.monotonic() - loaded_s, threads,
    )  # fmt: skip
    return engine
