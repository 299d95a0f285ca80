"""Engines whose kernels run in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.backends.gpu.backend import GpuBackend
from engine.backends.gpu.device import HostDevice
from engine.backends.gpu.linears import WeightScheme
from engine.backends.gpu.step_runner import GpuRunner
from engine.engine import Engine
from engine.gpu_memory.profile import GpuCacheSizer, MemoryMeter
from mesh.config import WorkerConfig


def gpu_engine(
    folder: Path, weights: WeightScheme = "fp32", *, overlap: bool = True, prepare: bool = True,
    activations: str = "", meter: MemoryMeter | None = None, **fields: Any,
) -> Engine:  # fmt: skip
    """As on a GPU: planned ahead, decodes in graphs (unless ``prepare`` is false)."""
    defaults: dict[str, Any] = {
        "role": "decode", "worker_id": "w", "redis_url": "redis://localhost",
        "model": str(folder), "kv_blocks": 24, "max_num_seqs": 6, "max_batched_tokens": 48,
        "max_model_len": 128, "max_step_ms": 0.0,
    }  # fmt: skip
    config = WorkerConfig(weights=weights, **{**defaults, **fields})
    config.validate()
    backend = GpuBackend(weights, HostDevice(), activations=activations)
    sizer = None if meter is None else GpuCacheSizer(config, meter)
    engine = Engine(config, backend, overlap=overlap, sizer=sizer)
    if prepare:
        runner(engine).prepare(engine.model)
    return engine


def runner(engine: Engine) -> GpuRunner:
    """The engine's."""
    assert isinstance(engine.runner, GpuRunner)
    return engine.runner
