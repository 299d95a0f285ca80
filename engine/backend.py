"""What a model needs from a device. The CPU and the GPU backend implement it.

Shape legend: T tokens in the step, H hidden size, Hq / Hkv query / KV heads, D head dim,
I intermediate size, V vocabulary, N sampled rows.

A backend owns its KV cache and whatever scratch its kernels need. Activations are tensors on
``device`` that live until the next step; ops may return views of reused buffers, so a caller keeps
nothing across steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from engine.batch import BatchInputs
from engine.model_config import HiddenAct
from mesh.shared_mapping import SharedMapping

if TYPE_CHECKING:
    from engine.step_runner import StepRunner
    from engine.tensor_parallel.group import TensorParallelGroup


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
class RopeTable:
    """cos and sin, [max positions, D / 2] float32."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(slots=True, frozen=True)
class QKNorm:
    """Per-head RMS norm weights of q and k, [D] each."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


@dataclass(slots=True, frozen=True)
class DenseLayer:
    """A decoder layer of the plain kind: nothing but this, in this order (``models.decoder``)."""

    attention_norm: torch.Tensor
    qkv: Linear
    qk_norm: QKNorm | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(slots=True, frozen=True)
class LayerForm:
    """What all plain layers of a model have in common."""

    eps: float
    """Of the norms."""
    rope: RopeTable
    scale: float
    """Of attention scores."""
    window: int
    """Sliding window in tokens; 0 is unlimited."""
    activation: HiddenAct
    head_dim: int
    num_kv_heads: int


class LayerStack(Protocol):
    """Runs all layers of a model in one go: same results as op by op."""

    def run(
        self,
        residual: torch.Tensor,
        step: Any,
        on_kv_written: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """[T, H] → the last layer's MLP output, [T, H], still to be added; ``residual`` in place.

        ``on_kv_written`` as of ``Decoder.forward``, but a layer is told of when all of it is done.
        """
        ...


KVDtype = Literal["fp32", "bf16", "fp16", "int8"]
_KV_ELEMENT_BYTES: dict[KVDtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}


@dataclass(slots=True, frozen=True)
class KVCacheSpec:
    """Geometry of the paged cache, ``[num_blocks, num_layers, 2, Hkv, block_size * row]``.

    Block-major: one block is one contiguous span, which is what a transfer moves. One token's K or
    V of one head takes the bytes of a row: D elements, plus a float32 scale for int8. How the rows
    of a block lie within a head is the backend's (``kv_layout`` names it).
    """

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: KVDtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        scale_bytes = 4 if self.dtype == "int8" else 0
        return self.head_dim * _KV_ELEMENT_BYTES[self.dtype] + scale_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.row_bytes


@dataclass(slots=True, frozen=True)
class KVMemory:
    """The cache as a transfer sees it."""

    raw: torch.Tensor
    """[num_blocks, block_bytes] uint8."""
    mapping: SharedMapping | None
    """What it lies in, so that workers of this host can map it; None for device memory."""

    @property
    def buffer(self) -> Any:
        """``raw`` as a transfer takes it: a buffer, or what has ``__cuda_array_interface__``."""
        return self.raw.numpy() if self.raw.device.type == "cpu" else self.raw


class StepInputs(Protocol):
    """A begun step: what the model reads of it; attention's metadata is the backend's own."""

    @property
    def token_ids(self) -> torch.Tensor:
        """[T] int64, on the device."""
        ...

    @property
    def sample_rows(self) -> torch.Tensor:
        """[N] int64, on the device."""
        ...


@dataclass(slots=True, frozen=True)
class StepSizes:
    """The largest step that an engine launches."""

    num_tokens: int
    num_sequences: int
    num_blocks: int
    """Of one sequence."""
    vocab_size: int


class Backend(Protocol):
    """Ops of a decoder-only transformer over a paged KV cache."""

    device: torch.device
    activation_dtype: torch.dtype
    has_attention_softcap: bool
    """Whether ``paged_attention`` can cap logits."""
    kv_layout: str
    """Names how KV lies in a block: workers exchange blocks only where these are equal."""

    @property
    def default_kv_dtype(self) -> KVDtype:
        """What the KV cache holds where nothing else is asked for."""
        ...

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Take a [out, in] float32 weight over into the device's stored form."""
        ...

    def router(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Take a [num_experts, H] float32 weight over: [T, H] activations → [T, num_experts].

        In float32 whatever the other weights are: they are few, and another choice of experts is
        another model.
        """
        ...

    def embedding_and_head(
        self, embedding: torch.Tensor, head: torch.Tensor | None
    ) -> tuple[Embedding, Linear]:
        """Take the [V, H] float32 tables over; without ``head`` both share one stored form."""
        ...

    def layer_stack(self, layers: Sequence[DenseLayer], form: LayerForm) -> LayerStack | None:
        """What runs all of them better than op by op; None: op by op is best."""
        ...

    def allocate_kv_cache(self, spec: KVCacheSpec) -> KVMemory:
        """Allocate the cache this backend will read and write."""
        ...

    def step_runner(self, sizes: StepSizes, group: TensorParallelGroup | None = None) -> StepRunner:
        """What launches this backend's steps; one engine's, made after the KV cache.

        ``group``: the ranks that run the model together; None: there is one.
        """
        ...

    def begin_step(self, batch: BatchInputs) -> Any:
        """Prepare a step's inputs (``StepInputs``) and metadata for its attention ops."""
        ...

    def rest(self) -> None:
        """No step follows at once: give up what is held only for computing."""
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
        self, qkv: torch.Tensor, rope: RopeTable, qk_norm: QKNorm | None, layer: int, step: Any
    ) -> None:
        """Normalise (if asked) and rotate q and k in place; store every token's k, v in its slot.

        Args:
            qkv: [T, (Hq + 2 Hkv) * D], q heads first.
            rope: rotation pairs element i with i + D / 2 (NeoX order).
            qk_norm: per-head RMS norm before the rotation.
            layer: which layer's slots.
            step: what ``begin_step`` returned.
        """
        ...

    def paged_attention(
        self, qkv: torch.Tensor, layer: int, scale: float, window: int, step: Any,
        softcap: float = 0.0,
    ) -> torch.Tensor:  # fmt: skip
        """Causal attention of every token over its sequence's cache; [T, Hq * D].

        A token sees the last ``window`` positions, itself included; 0 is unlimited. With
        ``softcap`` logits become ``softcap * tanh(logits / softcap)``.
        """
        ...

    def act_mul(self, gate_up: torch.Tensor, activation: HiddenAct) -> torch.Tensor:
        """[T, 2 I] → [T, I]: ``activation(gate) * up``."""
        ...
