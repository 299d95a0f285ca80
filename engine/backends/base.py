"""What a model needs from a device. The CPU backend implements it; a Triton one slots in beside.

Shape legend: T tokens in the step, H hidden size, Hq / Hkv query / KV heads, D head dim,
I intermediate size, V vocabulary, N sampled rows.

A backend owns its KV cache and whatever scratch its kernels need. Activations are tensors on
``device`` that live until the next step; ops may return views of reused buffers, so a caller keeps
nothing across steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.batch import BatchInputs


class Linear(Protocol):
    """A weight matrix ready for the device."""

    num_bytes: int
    """Memory of the stored form."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] → [T, out] in the activation dtype."""
        ...


class Embedding(Protocol):
    """Token embedding rows, stored in the device's form."""

    num_bytes: int
    """Memory that it does not share with the output head."""

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 → [T, H]."""
        ...


@dataclass(slots=True, frozen=True)
class KVCacheSpec:
    """Geometry of the paged cache, ``[num_blocks, num_layers, 2, Hkv, block_size, D]``.

    Block-major: one block is one contiguous span, which is what a transfer moves.
    """

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        slots = self.num_layers * 2 * self.num_kv_heads * self.block_size
        return slots * self.head_dim * self.dtype.itemsize


class Backend(Protocol):
    """Ops of a decoder-only transformer over a paged KV cache."""

    device: torch.device

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Take a [out, in] float32 weight over into the device's stored form."""
        ...

    def embedding_and_head(
        self, embedding: torch.Tensor, head: torch.Tensor | None
    ) -> tuple[Embedding, Linear]:
        """Take the [V, H] float32 tables over; without ``head`` both share one stored form."""
        ...

    def allocate_kv_cache(self, spec: KVCacheSpec) -> torch.Tensor:
        """Allocate the cache this backend will read and write; returned for transfer only."""
        ...

    def begin_step(self, batch: BatchInputs) -> Any:
        """Prepare per-step metadata; the result is passed to the attention ops of this step."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[T, H] → [T, H], statistics in float32."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """``residual += x`` in place, then its norm."""
        ...

    def rope_and_write_kv(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: int, step: Any
    ) -> None:
        """Rotate q and k in place and write k, v of every token into its slot.

        Args:
            qkv: [T, (Hq + 2 Hkv) * D], q heads first.
            cos: [max positions, D / 2]; rotation pairs element i with i + D / 2 (NeoX order).
            sin: like ``cos``.
            layer: which layer's slots.
            step: what ``begin_step`` returned.
        """
        ...

    def paged_attention(
        self, qkv: torch.Tensor, layer: int, scale: float, step: Any
    ) -> torch.Tensor:
        """Causal attention of every token over its sequence's cache; [T, Hq * D]."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 I] → [T, I]: ``silu(gate) * up``."""
        ...
