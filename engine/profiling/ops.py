"""A decoder whose every op runs in a named range, and what those ops moved and computed.

Made for the length of one profile; outside of it the engine runs the plain decoder, and nothing is
paid. A range is ``decode/attention/layer 3``: the phase of its step, the op, the layer. They appear
in the profiler's trace and, on CUDA, as NVTX ranges in Nsight Systems.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import record_function

from engine.backend import (
    Backend,
    DenseLayer,
    Embedding,
    KVCacheSpec,
    LayerForm,
    Linear,
    QKNorm,
    RopeTable,
    StepSizes,
)
from engine.batch import BatchInputs
from engine.model_config import HiddenAct
from engine.models.decoder import Decoder
from engine.step_runner import StepRunner
from engine.tensor_parallel.group import TensorParallelGroup

ALL_REDUCE = "all-reduce"
"""The op that is bound by the way between ranks."""


@dataclass(slots=True)
class OpWork:
    """Sums over all calls of one op in one phase."""

    num_calls: int = 0
    num_bytes: int = 0
    """Least that it must read and write."""
    num_flops: int = 0


@dataclass(slots=True)
class OpLog:
    """Opens the ranges and counts the work; one per profile."""

    spec: KVCacheSpec
    with_nvtx: bool
    phase: str = "decode"
    layer: int = 0
    work: dict[tuple[str, str], OpWork] = field(default_factory=dict)
    """By phase and op."""

    @contextlib.contextmanager
    def range(self, op: str, *, in_layer: bool = True) -> Iterator[OpWork]:
        """Time one call of ``op``; the caller adds what it moves and computes."""
        work = self.work.setdefault((self.phase, op), OpWork())
        work.num_calls += 1
        name = f"{self.phase}/{op}/layer {self.layer}" if in_layer else f"{self.phase}/{op}"
        if self.with_nvtx:
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        try:
            with record_function(name):
                yield work
        finally:
            if self.with_nvtx:
                torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def begin_step(self, batch: BatchInputs) -> None:
        """Name the phase: decoding sequences have one token each."""
        counts = batch.query_starts[1:] - batch.query_starts[:-1]
        decoding = int((counts == 1).sum())
        self.phase = "mixed" if 0 < decoding < len(counts) else "decode" if decoding else "prefill"
        self.layer = 0


def with_ranges(decoder: Decoder, log: OpLog) -> Decoder:
    """The same model, sharing all weights, with every op in a range of ``log``."""
    backend = _RangedBackend(decoder.backend, log)

    def wrap(linear: Linear, name: str, layer: int | None) -> Linear:
        return _RangedLinear(linear, name, layer, log)

    return decoder.instrumented(
        backend,
        wrap,
        lambda embed: _RangedEmbedding(embed, log),
        lambda group: _RangedGroup(group, log),
    )


def ranged(function: Callable[..., Any], op: str, log: OpLog) -> Callable[..., Any]:
    """``function`` in a range of its own."""

    def call(*arguments: Any) -> Any:
        with log.range(op, in_layer=False) as work:
            work.num_bytes += sum(a.nbytes for a in arguments if isinstance(a, torch.Tensor))
            return function(*arguments)

    return call


class _RangedLinear:
    def __init__(self, linear: Linear, name: str, layer: int | None, log: OpLog) -> None:
        self._linear = linear
        self._name = name
        self._layer = layer
        self._log = log
        self.num_bytes = linear.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        log = self._log
        if self._layer is not None:
            log.layer = self._layer
        with log.range(self._name, in_layer=self._layer is not None) as work:
            out = self._linear(x)
        work.num_bytes += self.num_bytes + x.nbytes + out.nbytes
        work.num_flops += 2 * x.shape[0] * x.shape[1] * out.shape[1]
        return out


class _RangedEmbedding:
    def __init__(self, embedding: Embedding, log: OpLog) -> None:
        self._embedding = embedding
        self._log = log
        self.num_bytes = embedding.num_bytes

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        with self._log.range("embed", in_layer=False) as work:
            out = self._embedding(token_ids)
        work.num_bytes += 2 * out.nbytes
        return out


class _RangedGroup(TensorParallelGroup):
    """Only of what a layer does; the time is also that of waiting for the slowest rank."""

    def __init__(self, group: TensorParallelGroup, log: OpLog) -> None:
        self._group = group
        self._log = log
        self.rank, self.size = group.rank, group.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        with self._log.range(ALL_REDUCE) as work:
            out = self._group.all_reduce(x)
        work.num_bytes += 2 * x.nbytes
        return out


class _RangedBackend:
    """Implements ``Backend`` by another one; it only runs a model, and never builds one."""

    def __init__(self, backend: Backend, log: OpLog) -> None:
        self._backend = backend
        self._log = log
        self._batch: BatchInputs | None = None
        self.device = backend.device
        self.activation_dtype = backend.activation_dtype
        self.has_attention_softcap = backend.has_attention_softcap
        self.kv_layout = backend.kv_layout
        self.default_kv_dtype = backend.default_kv_dtype

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return self._backend.linear(weight, bias)

    def router(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return self._backend.router(weight)

    def embedding_and_head(
        self, embedding: torch.Tensor, head: torch.Tensor | None
    ) -> tuple[Embedding, Linear]:
        return self._backend.embedding_and_head(embedding, head)

    def layer_stack(self, layers: Sequence[DenseLayer], form: LayerForm) -> None:
        """See Backend: op by op, so that each is seen."""
        return None

    def allocate_kv_cache(self, spec: KVCacheSpec) -> Any:
        return self._backend.allocate_kv_cache(spec)

    def step_runner(self, sizes: StepSizes, group: TensorParallelGroup | None = None) -> StepRunner:
        return self._backend.step_runner(sizes, group)

    def begin_step(self, batch: BatchInputs) -> Any:
        self._batch = batch
        self._log.begin_step(batch)
        with self._log.range("plan", in_layer=False):
            return self._backend.begin_step(batch)

    def rest(self) -> None:
        self._backend.rest()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        with self._log.range("norm") as work:
            out = self._backend.rms_norm(x, weight, eps)
        work.num_bytes += x.nbytes + out.nbytes
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        with self._log.range("norm") as work:
            out = self._backend.add_rms_norm(x, residual, weight, eps)
        work.num_bytes += x.nbytes + 2 * residual.nbytes + out.nbytes
        return out

    def rope_and_write_kv(
        self, qkv: torch.Tensor, rope: RopeTable, qk_norm: QKNorm | None, layer: int, step: Any
    ) -> None:
        spec = self._log.spec
        with self._log.range("rope and KV write") as work:
            self._backend.rope_and_write_kv(qkv, rope, qk_norm, layer, step)
        work.num_bytes += 2 * qkv.nbytes + 2 * len(qkv) * spec.num_kv_heads * spec.row_bytes

    def paged_attention(
        self, qkv: torch.Tensor, layer: int, scale: float, window: int, step: Any,
        softcap: float = 0.0,
    ) -> torch.Tensor:  # fmt: skip
        with self._log.range("attention") as work:
            out = self._backend.paged_attention(qkv, layer, scale, window, step, softcap)
        batch, spec = self._batch, self._log.spec
        assert batch is not None, "begin_step first"
        seen, read = batch.positions.astype("int64") + 1, batch.context_lens.astype("int64")
        if window:
            counts = batch.query_starts[1:] - batch.query_starts[:-1]
            seen, read = seen.clip(max=window), read.clip(max=window + counts - 1)
        work.num_flops += 4 * int(seen.sum()) * out.shape[1]
        kv_bytes = 2 * int(read.sum()) * spec.num_kv_heads * spec.row_bytes
        work.num_bytes += kv_bytes + 2 * out.nbytes
        return out

    def act_mul(self, gate_up: torch.Tensor, activation: HiddenAct) -> torch.Tensor:
        with self._log.range("activation") as work:
            out = self._backend.act_mul(gate_up, activation)
        work.num_bytes += gate_up.nbytes + out.nbytes
        return out
