"""Measures what a loaded model leaves of a GPU, and refuses early what cannot fit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from engine.backend import KVCacheSpec
from engine.gpu_memory.fit import Alternative, GpuMemory, KVDemand, Share, fit_kv_blocks
from engine.gpu_memory.largest_step import run_largest_step
from engine.model_config import ModelConfig
from engine.models.decoder import Decoder
from engine.weights.stored_size import MATRIX_BITS, least_weight_bytes
from mesh.config import WEIGHTS, WorkerConfig

_RANKS = (2, 4, 8)
_MIB = 1 << 20

_logger = logging.getLogger(__name__)


class MemoryMeter(Protocol):
    """What is used of a device's memory, in bytes."""

    def total(self) -> int:
        """All of it."""
        ...

    def outside(self) -> int:
        """In use by everything but this process's tensors and what is kept for them."""
        ...

    def allocated(self) -> int:
        """By this process's tensors, now."""
        ...

    def peak_of(self, run: Callable[[], object]) -> int:
        """By this process's tensors, at most while ``run`` runs, which the device has then done."""
        ...


class CudaMeter:
    """Implements ``MemoryMeter`` for a GPU of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def outside(self) -> int:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free - torch.cuda.memory_reserved(self._device))

    def allocated(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def peak_of(self, run: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device))


class GpuCacheSizer:
    """Decides the number of KV blocks of a worker on a GPU."""

    def __init__(self, config: WorkerConfig, meter: MemoryMeter) -> None:
        """Prepare.

        Args:
            config: the worker's, with its weight scheme decided.
            meter: of its GPU.
        """
        self._config = config
        self._meter = meter
        self._share = Share(config.gpu_memory_utilization, config.num_gpu_sharers)

    def check(self, model: ModelConfig, spec: KVCacheSpec, max_model_len: int) -> None:
        """Before anything is loaded: refuse what cannot fit whatever a step needs.

        Args:
            model: what is to be loaded.
            spec: geometry of its cache on one GPU.
            max_model_len: tokens of the longest sequence.

        Raises:
            ConfigError: see ``fit_kv_blocks``.
        """
        config = self._config
        memory = GpuMemory(
            total=self._meter.total(),
            outside=self._meter.outside(),
            weights=least_weight_bytes(model, config.weights, config.num_gpus),
            activations=0,
        )
        self._fit(memory, model, spec, max_model_len)

    def __call__(self, model: Decoder, spec: KVCacheSpec, max_model_len: int) -> int:
        """Once the model is loaded: the number of blocks, staging not counted.

        Runs the largest step; the cache is to be allocated afterwards.

        Raises:
            ConfigError: see ``fit_kv_blocks``.
        """
        config, meter = self._config, self._meter
        weights = meter.allocated()
        peak = meter.peak_of(
            lambda: run_largest_step(
                model,
                spec,
                max_num_seqs=config.max_num_seqs,
                max_batched_tokens=config.max_batched_tokens,
                max_model_len=max_model_len,
            )
        )
        memory = GpuMemory(
            total=meter.total(),
            outside=meter.outside(),
            weights=weights,
            activations=max(1, peak - weights),
        )
        num_blocks = self._fit(memory, model.config, spec, max_model_len)
        _logger.info(
            "gpu memory total_mib=%d outside_mib=%d weights_mib=%d activations_mib=%d kv_mib=%d",
            memory.total // _MIB, memory.outside // _MIB, memory.weights // _MIB,
            memory.activations // _MIB, num_blocks * spec.block_bytes // _MIB,
        )  # fmt: skip
        return num_blocks

    def _fit(
        self, memory: GpuMemory, model: ModelConfig, spec: KVCacheSpec, max_model_len: int
    ) -> int:
        demand = KVDemand(
            block_bytes=spec.block_bytes,
            block_size=spec.block_size,
            max_model_len=max_model_len,
            num_staging_blocks=self._config.num_staging_blocks,
        )
        return fit_kv_blocks(
            memory,
            demand,
            self._share,
            num_blocks=self._config.kv_blocks,
            alternatives=self._alternatives(model, spec),
        )

    def _alternatives(self, model: ModelConfig, spec: KVCacheSpec) -> list[Alternative]:
        """Smaller weights, and more GPUs."""
        config = self._config
        bits = MATRIX_BITS[config.weights]
        found = [
            Alternative(
                f"--weights {scheme}",
                least_weight_bytes(model, scheme, config.num_gpus),
                spec.block_bytes,
            )
            for scheme in WEIGHTS
            if scheme != "auto" and MATRIX_BITS[scheme] < bits
        ]
        for num_ranks in _RANKS:
            if num_ranks > config.num_gpus and model.num_heads % num_ranks == 0:
                heads = max(1, model.num_kv_heads // num_ranks)
                found.append(
                    Alternative(
                        f"--tensor-parallel {num_ranks}",
                        least_weight_bytes(model, config.weights, num_ranks),
                        replace(spec, num_kv_heads=heads).block_bytes,
                    )
                )
        return found
