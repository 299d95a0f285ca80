"""One model on one device: scheduler + block pool + model, advanced by ``step``.

Single-threaded: everything here runs on the worker's model thread.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.backends.base import Backend, KVCacheSpec
from engine.batch import BatchInputs, build_batch
from engine.block_pool import BlockPool
from engine.constrainer import Constrainer
from engine.gpu_profile import GpuCacheSizer
from engine.model_config import ModelConfig
from engine.models.decoder import Decoder
from engine.placement import ON_CPU, Placement
from engine.profiling.limits import Limits
from engine.profiling.session import ProfileSession
from engine.sampler import SampledToken, sample
from engine.scheduler import ScheduledChunk, Scheduler
from engine.sequence import Sequence
from engine.tensor_parallel.group import TensorParallelGroup
from engine.tensor_parallel.shard import ModelShard, plan_shard
from engine.weights import open_model
from mesh import metrics
from mesh.config import WorkerConfig
from mesh.errors import ConfigError, GrammarFailed
from mesh.messages import PROTOCOL_VERSION
from mesh.model_files import resolve_model

KV_LAYOUT = "block-layer-kv-head/2"
_MIB = 1 << 20
_EWMA_WEIGHT = 0.2
_STEP_TOKENS = metrics.histogram(
    metrics.ITERATION_TOKENS, "Tokens computed in a step.", buckets=metrics.TOKEN_COUNT_BUCKETS
)


@dataclass(slots=True, frozen=True)
class StepResult:
    """A token that a step produced; already appended to its sequence."""

    sequence: Sequence
    token: SampledToken


@dataclass(slots=True, frozen=True)
class StepOutcome:
    """Everything a step changed that others must hear of."""

    results: list[StepResult]
    computed: list[Sequence]
    """Sequences that had any chunk computed (their finished blocks can be sent)."""
    reserved: list[Sequence]
    """Sequences that now hold blocks for KV from a prefill worker."""
    expired: list[Sequence]
    """Sequences dropped at their deadline; their blocks are free."""
    displaced: Sequence | None
    """A computed sequence to give up, see ``StepPlan``."""
    failed: list[tuple[Sequence, GrammarFailed]]
    """Sequences that cannot go on, still running: the caller ends them."""
    num_tokens: int
    """Computed."""


OnLayerGroup = Callable[[list[ScheduledChunk], int], None]
"""Called with a step's chunks and the index of a group of layers whose KV of them is written."""


class Engine:
    """Owns the model, the KV cache and every live sequence of this worker."""

    def __init__(
        self,
        config: WorkerConfig,
        backend: Backend,
        group: TensorParallelGroup | None = None,
        *,
        sizer: GpuCacheSizer | None = None,
        placement: Placement = ON_CPU,
    ) -> None:
        """Load the model and allocate the cache; of several ranks, this one's part of both.

        Args:
            config: this worker's.
            backend: runs the model.
            group: the ranks among which it is divided; None: it is whole.
            sizer: decides the number of KV blocks; None: the configuration does.
            placement: what the backend computes on, for those who ask.

        Raises:
            ConfigError: the model or the cache size is unusable; says which number to change.
        """
        files = resolve_model(config.model)
        self.model_config, source = open_model(files)
        self.placement = placement
        max_model_len = _max_model_len(config, self.model_config)
        self.group = group = group or TensorParallelGroup()
        self.shard = plan_shard(self.model_config, group.rank, group.size, config.weights)
        self.kv_spec = _kv_spec(config, self.model_config, self.shard)
        if sizer is not None:
            sizer.check(self.model_config, self.kv_spec, max_model_len)
        with source:
            self.model = Decoder(
                self.model_config, source, backend, max_model_len, self.shard, group
            )
            weights_hash = source.content_hash()
        num_blocks = self.kv_spec.num_blocks
        if sizer is not None:
            num_blocks = sizer(self.model, self.kv_spec, max_model_len)
        self.kv_spec = replace(self.kv_spec, num_blocks=group.least(num_blocks))
        self._backend = backend
        num_blocks = self.kv_spec.num_blocks + config.num_staging_blocks
        self.kv_memory = backend.allocate_kv_cache(replace(self.kv_spec, num_blocks=num_blocks))
        self.scheduler = Scheduler(
            BlockPool(self.kv_spec.num_blocks),
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
        )
        self.constrainer = Constrainer(files, self.model_config.vocab_size)
        self.fingerprint = _fingerprint(self.model_config, weights_hash, self.kv_spec)
        self._num_layer_groups = config.kv_layer_groups
        if self.model_config.num_layers % config.kv_layer_groups:
            raise ConfigError(
                f"kv_layer_groups: {config.kv_layer_groups} does not divide the model's "
                f"{self.model_config.num_layers} layers"
            )
        self.profile: ProfileSession | None = None
        """Set by the control loop, unset by the model thread when it is over."""
        self.limits: Limits | None = None
        """Measured by the first profile."""
        self._plain_model = self.model
        self._build_batch, self._sample = build_batch, sample
        self.announce: Callable[[BatchInputs], None] | None = None
        """Tells the other ranks what is computed next, before every forward."""
        self.num_forwards = 0
        self.step_time_s = 0.0
        self.tokens_per_s = 0.0
        self.max_sequence_tokens = min(max_model_len, self.scheduler.max_tokens_per_sequence())
        """Prompt plus output tokens that a single request can ever hold here."""

    def step(self, on_group: OnLayerGroup | None = None) -> StepOutcome:
        """Schedule, compute, sample. Cheap when there is nothing to do.

        ``on_group`` is called during the forward, each time that a group of layers has written the
        step's KV.
        """
        if self.profile is not None:
            return self.profile.step(self._step, on_group)
        return self._step(on_group)

    @torch.inference_mode()
    def _step(self, on_group: OnLayerGroup | None) -> StepOutcome:
        plan = self.scheduler.schedule()
        results: list[StepResult] = []
        failed: list[tuple[Sequence, GrammarFailed]] = []
        num_tokens = 0
        if plan.chunks:
            start_s = time.monotonic()
            for chunk in plan.chunks:
                if not chunk.sequence.first_step_s:
                    chunk.sequence.first_step_s = start_s
            batch = self._build_batch(plan.chunks, self.scheduler.block_size)
            sampled = [chunk.sequence for chunk in plan.chunks if chunk.samples]
            on_kv_written = None if on_group is None else self._by_group(plan.chunks, on_group)
            self.constrainer.begin(sampled)
            self.num_forwards += 1
            if self.announce is not None:
                self.announce(batch)
            logits = self.model.forward(batch, on_kv_written)
            late, failed = self.constrainer.collect(sampled)
            if late or failed:
                unsampled = {*late, *(sequence for sequence, _ in failed)}
                rows = [i for i, sequence in enumerate(sampled) if sequence not in unsampled]
                sampled = [sampled[i] for i in rows]
                logits = logits[rows]
            tokens = self._sample(logits, sampled) if sampled else []
            self.scheduler.step_done(plan, late=late)
            for sequence, token in zip(sampled, tokens, strict=True):
                sequence.append(token.token_id)
                results.append(StepResult(sequence, token))
            num_tokens = batch.num_tokens
            self._observe(time.monotonic() - start_s, num_tokens)
        return StepOutcome(
            results=results,
            computed=[chunk.sequence for chunk in plan.chunks],
            reserved=plan.reserved,
            expired=plan.expired,
            displaced=plan.displaced,
            failed=failed,
            num_tokens=num_tokens,
        )

    @torch.inference_mode()
    def follow(self, batch: BatchInputs, on_group: Callable[[int], None] | None = None) -> None:
        """Compute this rank's part of a step that rank 0 announced.

        ``on_group`` is called with the index of each group of layers whose KV is written.
        """
        on_kv_written = None if on_group is None else self._each_group(on_group)
        self.model.forward(batch, on_kv_written)

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._backend.device

    def instrument(self, model: Decoder, wrap: Callable[[Any, str], Any]) -> None:
        """Run ``model`` instead, and what ``wrap`` makes of the functions around it."""
        self._plain_model, self.model = self.model, model
        self._build_batch, self._sample = wrap(build_batch, "batch"), wrap(sample, "sample")

    def end_instrument(self) -> None:
        """Run the model itself again."""
        self.model = self._plain_model
        self._build_batch, self._sample = build_batch, sample

    def _by_group(
        self, chunks: list[ScheduledChunk], on_group: OnLayerGroup
    ) -> Callable[[int], None]:
        return self._each_group(lambda group: on_group(chunks, group))

    def _each_group(self, on_group: Callable[[int], None]) -> Callable[[int], None]:
        group_size = self.model_config.num_layers // self._num_layer_groups

        def on_kv_written(layer: int) -> None:
            group, is_last = divmod(layer + 1, group_size)
            if is_last == 0:
                on_group(group - 1)

        return on_kv_written

    def rest(self) -> None:
        """Tell the device that no step follows at once."""
        self._backend.rest()
        if self.profile is not None:
            self.profile.rest()

    def _observe(self, seconds: float, num_tokens: int) -> None:
        _STEP_TOKENS.observe(num_tokens)
        if self.step_time_s == 0.0:
            self.step_time_s, self.tokens_per_s = seconds, num_tokens / seconds
            return
        self.step_time_s += _EWMA_WEIGHT * (seconds - self.step_time_s)
        self.tokens_per_s += _EWMA_WEIGHT * (num_tokens / seconds - self.tokens_per_s)


def _max_model_len(config: WorkerConfig, model: ModelConfig) -> int:
    if config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is over the model's "
            f"{model.max_position_embeddings}"
        )
    return config.max_model_len or model.max_position_embeddings


def _kv_spec(config: WorkerConfig, model: ModelConfig, shard: ModelShard) -> KVCacheSpec:
    dtype = config.kv_dtype
    spec = KVCacheSpec(
        num_blocks=config.kv_blocks or 1,
        num_layers=model.num_layers,
        num_kv_heads=len(shard.kv_heads),
        block_size=config.block_size,
        head_dim=model.head_dim,
        dtype=("fp32" if config.weights == "fp32" else "fp16") if dtype == "auto" else dtype,
    )
    if config.kv_blocks:
        return spec
    num_blocks = config.kv_memory_mib * _MIB // shard.size // spec.block_bytes
    if num_blocks < 1:
        shared = f" for each of {shard.size} ranks" if shard.size > 1 else ""
        raise ConfigError(
            f"kv_memory_mib {config.kv_memory_mib} holds no block of {spec.block_bytes} bytes"
            + shared
        )
    return replace(spec, num_blocks=num_blocks)


def _fingerprint(model: ModelConfig, weights_hash: str, spec: KVCacheSpec) -> str:
    """Hash of everything that must be equal for two workers to exchange KV blocks.

    Not of the number of ranks: workers of different ones exchange heads.
    """
    parts: list[object] = [
        PROTOCOL_VERSION, KV_LAYOUT, model, weights_hash,
        spec.num_layers, model.num_kv_heads, spec.block_size, spec.head_dim, spec.dtype,
    ]  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
