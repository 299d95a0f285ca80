"""The CPU backend: glue between torch tensors and numba kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numba
import numpy as np
import torch

from engine.backend import (
    DenseLayer,
    Embedding,
    KVCacheSpec,
    KVDtype,
    KVMemory,
    LayerForm,
    Linear,
    QKNorm,
    RopeTable,
    StepSizes,
)
from engine.backends.cpu import elementwise, kv_store
from engine.backends.cpu.attention import CpuStep, paged_attention, plan_tiles
from engine.backends.cpu.core_share import CoreShare
from engine.backends.cpu.float32_linear import Float32Embedding, Float32Linear
from engine.backends.cpu.layer_stack import CpuLayerStack, is_plain
from engine.backends.cpu.quantized_linear import QuantizedEmbedding, QuantizedLinear, pack
from engine.backends.cpu.workspace import Workspace
from engine.batch import BatchInputs
from engine.model_config import HiddenAct
from engine.step_runner import HostRunner, StepRunner
from engine.tensor_parallel.group import TensorParallelGroup

WeightScheme = Literal["fp32", "int8", "int4"]
_BITS = {"int8": 8, "int4": 4}
_MOST_THREADS = numba.get_num_threads()  # no thread has set its own yet
_NO_NORM = np.empty(0, np.float32)


class CpuBackend:
    """Implements ``engine.backend.Backend`` with float32 activations.

    Owns the KV cache after ``allocate_kv_cache``. Not thread-safe: one engine, one thread.
    """

    device = torch.device("cpu")
    activation_dtype = torch.float32
    has_attention_softcap = False
    kv_layout = "block-layer-kv-head/2"

    def __init__(self, weights: WeightScheme, num_threads: int | CoreShare) -> None:
        """Prepare; ``num_threads`` is fixed, or asked for at every step."""
        self._weights = weights
        self._num_threads = num_threads
        self._kv: kv_store.KVView | None = None
        self._workspace = Workspace()

    @property
    def default_kv_dtype(self) -> KVDtype:
        return "fp32" if self._weights == "fp32" else "fp16"

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Take a [out, in] float32 weight over, quantised if the scheme says so."""
        if self._weights == "fp32":
            return Float32Linear(weight, bias, self._workspace)
        return QuantizedLinear(weight, bias, _BITS[self._weights], self._workspace)

    def router(self, weight: torch.Tensor) -> Float32Linear:
        return Float32Linear(weight, None, self._workspace)

    def embedding_and_head(
        self, embedding: torch.Tensor, head: torch.Tensor | None
    ) -> tuple[Embedding, Linear]:
        """Take the [V, H] float32 tables over: 8 bits in both quantised schemes.

        The logits' precision matters most, and at 4 bits the head saves little next to the layers.
        """
        tied = head is None
        head = embedding if head is None else head
        if self._weights == "fp32":
            return Float32Embedding(embedding, shared=tied), Float32Linear(
                head, None, self._workspace
            )
        linear = QuantizedLinear(head, None, 8, self._workspace)
        packed = linear.packed if tied else pack(embedding, 8)
        return QuantizedEmbedding(packed, embedding.shape[1], shared=tied), linear

    def layer_stack(self, layers: Sequence[DenseLayer], form: LayerForm) -> CpuLayerStack | None:
        if not is_plain(layers):
            return None
        return CpuLayerStack(layers, form, lambda: self._view, self._workspace)

    def allocate_kv_cache(self, spec: KVCacheSpec) -> KVMemory:
        memory, self._kv = kv_store.allocate(spec)
        return memory

    def step_runner(self, sizes: StepSizes, group: TensorParallelGroup | None = None) -> StepRunner:
        return HostRunner()

    def begin_step(self, batch: BatchInputs) -> CpuStep:
        """Choose the threads, and cut the step's attention into tiles, once for all layers."""
        share = self._num_threads
        num_threads = share.take() if isinstance(share, CoreShare) else share
        # Both settings belong to the calling thread.
        numba.set_num_threads(min(num_threads, _MOST_THREADS))
        self._workspace.num_threads = min(num_threads, _MOST_THREADS)
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        return CpuStep(
            batch,
            plan_tiles(batch, self._view.values.shape[2], num_threads),
            torch.from_numpy(batch.token_ids),
            torch.from_numpy(batch.sample_rows),
        )

    def rest(self) -> None:
        if isinstance(self._num_threads, CoreShare):
            self._num_threads.give_back()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        elementwise.rms_norm(x, weight, eps, out)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        elementwise.add_rms_norm(x, residual, weight, eps, out)
        return out

    def rope_and_write_kv(
        self, qkv: torch.Tensor, rope: RopeTable, qk_norm: QKNorm | None, layer: int, step: CpuStep
    ) -> None:
        kv = self._view
        _, _, num_kv_heads, _, head_dim = kv.values.shape
        q_norm = _NO_NORM if qk_norm is None else qk_norm.q.numpy()
        k_norm = _NO_NORM if qk_norm is None else qk_norm.k.numpy()
        eps = 0.0 if qk_norm is None else qk_norm.eps
        elementwise.rope_write_kv(
            qkv.numpy(), step.batch.positions, step.batch.slot_mapping,
            rope.cos.numpy(), rope.sin.numpy(), q_norm, k_norm, np.float32(eps),
            kv.keys, kv.values, kv.scales, layer, qkv.shape[1] // head_dim - 2 * num_kv_heads,
        )  # fmt: skip

    def paged_attention(
        self, qkv: torch.Tensor, layer: int, scale: float, window: int, step: CpuStep,
        softcap: float = 0.0,
    ) -> torch.Tensor:  # fmt: skip
        assert not softcap, "refused by name before"
        kv = self._view
        _, _, num_kv_heads, _, head_dim = kv.values.shape
        out = torch.empty(qkv.shape[0], qkv.shape[1] - 2 * num_kv_heads * head_dim)
        tiles = step.tiles
        paged_attention(
            qkv.numpy(), kv.keys, kv.values, kv.scales, layer, step.batch.block_tables,
            tiles.sequence, tiles.first_row, tiles.num_tokens, tiles.first_position,
            tiles.thread_bounds, np.float32(scale), window, out.numpy(),
        )  # fmt: skip
        return out

    def act_mul(self, gate_up: torch.Tensor, activation: HiddenAct) -> torch.Tensor:
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
        elementwise.act_mul(gate_up, activation == "gelu_tanh", out)
        return out

    @property
    def _view(self) -> kv_store.KVView:
        assert self._kv is not None, "allocate_kv_cache first"
        return self._kv
