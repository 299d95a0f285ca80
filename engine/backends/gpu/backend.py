"""The GPU backend: glue between the decoder and the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from engine.backends.gpu.device import CudaDevice, Device
from engine.backends.gpu.kernels.act_mul import act_mul
from engine.backends.gpu.kernels.attention.paged_decode import (
    choose_splits,
    paged_decode,
    workspace_size,
)
from engine.backends.gpu.kernels.attention.rope_kv_write import rope_kv_write
from engine.backends.gpu.kernels.attention.varlen_prefill import varlen_prefill
from engine.backends.gpu.kernels.rms_norm import add_rms_norm, rms_norm
from engine.backends.gpu.kv_view import KVView, kv_view
from engine.backends.gpu.linears import LinearMaker, WeightScheme
from engine.backends.gpu.step import GpuStep, StepInputBuffers
from engine.backends.gpu.step_runner import GpuRunner
from engine.batch import BatchInputs
from engine.model_config import HiddenAct
from engine.tensor_parallel.group import TensorParallelGroup

ACTIVATIONS: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


class GpuBackend:
    """Implements ``engine.backend.Backend``: bfloat16 activations unless told otherwise.

    Owns the KV cache after ``allocate_kv_cache``. Not thread-safe: one engine, one thread.
    """

    has_attention_softcap = True
    kv_layout = "block-layer-kv-head/rows-1"

    def __init__(
        self, weights: WeightScheme, device: Device | None = None, *, activations: str = ""
    ) -> None:
        """Prepare.

        Args:
            weights: Stored form of the matrices.
            device: Where to compute; None: the current GPU.
            activations: One of ``ACTIVATIONS``; empty: that of dense weights, else bf16.
        """
        self._device = CudaDevice() if device is None else device
        self.device = self._device.torch_device
        self._activations = activations or (weights if weights in ACTIVATIONS else "bf16")
        self.activation_dtype = ACTIVATIONS[self._activations]
        self._linears = LinearMaker(weights, self.activation_dtype, self.device)
        self._kv: KVView | None = None
        self._inputs: StepInputBuffers | None = None
        self._splits: list[int] = []
        """By the number of decodes; the same for any context, since a captured graph is."""
        self._workspace: torch.Tensor | None = None

    @property
    def default_kv_dtype(self) -> KVDtype:
        """See Backend: that of the activations."""
        match self._activations:
            case "fp32":
                return "fp32"
            case "fp16":
                return "fp16"
            case _:
                return "bf16"

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return self._linears.linear(weight, bias)

    def router(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        columns = weight.to(self.device).T
        return lambda x: x.float() @ columns

    def embedding_and_head(
        self, embedding: torch.Tensor, head: torch.Tensor | None
    ) -> tuple[Embedding, Linear]:
        return self._linears.embedding_and_head(embedding, head)

    def layer_stack(self, layers: Sequence[DenseLayer], form: LayerForm) -> None:
        """See Backend: graphs of whole decode steps do it here."""
        return None

    def allocate_kv_cache(self, spec: KVCacheSpec) -> KVMemory:
        pool = torch.zeros(spec.num_blocks, spec.block_bytes, dtype=torch.uint8, device=self.device)
        self._kv = kv_view(pool, spec)
        return KVMemory(pool, None)

    def step_runner(self, sizes: StepSizes, group: TensorParallelGroup | None = None) -> GpuRunner:
        self._inputs = StepInputBuffers(self._device, sizes)
        self._workspace = None
        _, _, num_kv_heads, block_size, _ = self._view.keys.shape
        self._splits = [
            choose_splits(
                batch, num_kv_heads, sizes.num_blocks * block_size, self._device.num_processors
            )
            for batch in range(sizes.num_sequences + 1)
        ]
        return GpuRunner(self._device, self._inputs, sizes, block_size, group)

    def begin_step(self, batch: BatchInputs) -> GpuStep:
        """See Backend; begins the copies to the device, waits for none."""
        assert self._inputs is not None, "step_runner first"
        self._device.use()
        return self._inputs.begin(batch)

    def rest(self) -> None:
        """See Backend: nothing is held."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        rms_norm(x, weight, eps, out=out)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        add_rms_norm(x, residual, weight, eps, out=out)
        return out

    def rope_and_write_kv(
        self, qkv: torch.Tensor, rope: RopeTable, qk_norm: QKNorm | None, layer: int, step: GpuStep
    ) -> None:
        keys, values, k_scales, v_scales = self._layer(layer)
        rope_kv_write(
            qkv, step.positions, step.slot_mapping, rope.cos, rope.sin,
            None if qk_norm is None else qk_norm.q, None if qk_norm is None else qk_norm.k,
            0.0 if qk_norm is None else qk_norm.eps,
            keys, values, k_scales, v_scales, self._num_q_heads(qkv),
        )  # fmt: skip

    def paged_attention(
        self, qkv: torch.Tensor, layer: int, scale: float, window: int, step: GpuStep,
        softcap: float = 0.0,
    ) -> torch.Tensor:  # fmt: skip
        """See Backend: sequences with one token split their keys, the others their queries."""
        cache = self._layer(layer)
        num_heads, head_dim = self._num_q_heads(qkv), cache[0].shape[3]
        q = qkv[:, : num_heads * head_dim].view(len(qkv), num_heads, head_dim)
        out = torch.empty(q.shape, dtype=qkv.dtype, device=qkv.device)
        decodes = step.num_decodes
        if decodes:
            paged_decode(
                q[:decodes], *cache, step.block_tables[:decodes], step.context_lens[:decodes],
                scale=scale, window=window, softcap=softcap, out=out[:decodes],
                workspace=self._split_workspace(num_heads, head_dim),
                num_splits=self._splits[decodes],
            )  # fmt: skip
        if decodes < len(step.context_lens):
            varlen_prefill(
                q[decodes:], *cache, step.query_starts, step.context_lens[decodes:],
                step.block_tables[decodes:], scale=scale, window=window, softcap=softcap,
                max_query_len=step.max_query_len, out=out[decodes:],
            )  # fmt: skip
        return out.view(len(qkv), num_heads * head_dim)

    def act_mul(self, gate_up: torch.Tensor, activation: HiddenAct) -> torch.Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        act_mul(gate_up, activation, out=out)
        return out

    def _layer(
        self, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        kv = self._view
        if kv.k_scales is None or kv.v_scales is None:
            return kv.keys[:, layer], kv.values[:, layer], None, None
        return (
            kv.keys[:, layer], kv.values[:, layer], kv.k_scales[:, layer], kv.v_scales[:, layer],
        )  # fmt: skip

    def _num_q_heads(self, qkv: torch.Tensor) -> int:
        _, _, num_kv_heads, _, head_dim = self._view.keys.shape
        return qkv.shape[1] // head_dim - 2 * num_kv_heads

    def _split_workspace(self, num_heads: int, head_dim: int) -> torch.Tensor:
        """Serves steps of any size, so that it keeps its place once graphs know it."""
        if self._workspace is None:
            sizes = [
                workspace_size(batch, num_heads, head_dim, num_splits)
                for batch, num_splits in enumerate(self._splits)
            ]
            self._workspace = torch.empty(max(sizes), dtype=torch.float32, device=self.device)
        return self._workspace

    @property
    def _view(self) -> KVView:
        assert self._kv is not None, "allocate_kv_cache first"
        return self._kv
