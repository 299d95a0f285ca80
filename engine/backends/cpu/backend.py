"""The CPU backend: glue between torch tensors and numba kernels."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Literal

import numba
import numpy as np
import numpy.typing as npt
import torch

from engine.backends.base import Embedding, KVCacheSpec, Linear
from engine.backends.cpu import elementwise
from engine.backends.cpu.attention import AttentionTiles, paged_attention_kernel, plan_tiles
from engine.backends.cpu.float32_linear import Float32Embedding, Float32Linear
from engine.backends.cpu.quantized_linear import QuantizedEmbedding, QuantizedLinear, pack
from engine.batch import BatchInputs

WeightScheme = Literal["fp32", "int8", "int4"]
_BITS = {"int8": 8, "int4": 4}


@dataclass(slots=True, frozen=True)
class CpuStep:
    """Per-step metadata of the attention ops."""

    batch: BatchInputs
    tiles: AttentionTiles


class CpuBackend:
    """Implements ``engine.backends.base.Backend`` with float32 activations.

    Owns the KV cache after ``allocate_kv_cache``. Not thread-safe: one engine, one thread.
    """

    device = torch.device("cpu")

    def __init__(self, weights: WeightScheme, num_threads: int) -> None:
        self._weights = weights
        self._num_threads = num_threads
        self._kv: npt.NDArray[np.float32] | None = None
        torch.set_num_threads(num_threads)
        numba.set_num_threads(min(num_threads, numba.get_num_threads()))

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Take a [out, in] float32 weight over, quantised if the scheme says so."""
        if self._weights == "fp32":
            return Float32Linear(weight, bias)
        return QuantizedLinear(weight, bias, _BITS[self._weights])

    def embedding_and_head(
        self, embedding: torch.Tensor, head: torch.Tensor | None
    ) -> tuple[Embedding, Linear]:
        """Take the [V, H] float32 tables over: 8 bits in both quantised schemes.

        The logits' precision matters most, and at 4 bits the head saves little next to the layers.
        """
        tied = head is None
        head = embedding if head is None else head
        if self._weights == "fp32":
            return Float32Embedding(embedding, shared=tied), Float32Linear(head, None)
        linear = QuantizedLinear(head, None, 8)
        packed = linear.packed if tied else pack(embedding, 8)
        return QuantizedEmbedding(packed, embedding.shape[1], shared=tied), linear

    def allocate_kv_cache(self, spec: KVCacheSpec) -> torch.Tensor:
        """Allocate the cache (float32); pages are touched on first use only."""
        if spec.dtype is not torch.float32:
            raise ValueError(f"the CPU backend stores KV as float32, not {spec.dtype}")
        # A shared mapping: what lets a transfer library on this host map it and copy once.
        memory = mmap.mmap(-1, spec.num_blocks * spec.block_bytes)
        cache = torch.frombuffer(memory, dtype=torch.float32).view(
            spec.num_blocks, spec.num_layers, 2, spec.num_kv_heads, spec.block_size, spec.head_dim
        )
        self._kv = cache.numpy()
        return cache

    def begin_step(self, batch: BatchInputs) -> CpuStep:
        """Cut the step's attention into tiles, once for all layers."""
        assert self._kv is not None, "allocate_kv_cache first"
        return CpuStep(batch, plan_tiles(batch, self._kv.shape[3], self._num_threads))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Backend."""
        out = torch.empty_like(x)
        elementwise.rms_norm(x.numpy(), weight.numpy(), np.float32(eps), out.numpy())
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See Backend."""
        out = torch.empty_like(x)
        elementwise.add_rms_norm(
            x.numpy(), residual.numpy(), weight.numpy(), np.float32(eps), out.numpy()
        )
        return out

    def rope_and_write_kv(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: int, step: CpuStep
    ) -> None:
        """See Backend."""
        kv = self._kv
        assert kv is not None
        num_heads = qkv.shape[1] // kv.shape[5] - 2 * kv.shape[3]
        batch = step.batch
        elementwise.rope_write_kv(
            qkv.numpy(), batch.positions, batch.slot_mapping, cos.numpy(), sin.numpy(),
            kv, layer, num_heads,
        )  # fmt: skip

    def paged_attention(
        self, qkv: torch.Tensor, layer: int, scale: float, step: CpuStep
    ) -> torch.Tensor:
        """See Backend."""
        kv = self._kv
        assert kv is not None
        _, _, _, num_kv_heads, block_size, head_dim = kv.shape
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        kernel = paged_attention_kernel(head_dim, num_heads // num_kv_heads, block_size)
        out = torch.empty(qkv.shape[0], num_heads * head_dim)
        tiles = step.tiles
        kernel(
            qkv.numpy(), kv, layer, step.batch.block_tables,
            tiles.sequence, tiles.first_row, tiles.num_tokens, tiles.first_position,
            tiles.thread_bounds, np.float32(scale), 0, out.numpy(),
        )  # fmt: skip
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Backend."""
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
        elementwise.silu_mul(gate_up.numpy(), out.numpy())
        return out
