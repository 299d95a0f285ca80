"""One model on one device: scheduler + block pool + model, advanced by ``step``.

The worker's model thread runs it. Beside it only the grammar threads work for it, and the control
loop sets ``profile``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.backend import Backend, StepSizes
from engine.batch import BatchInputs, build_batch
from engine.cache.block_pool import BlockPool
from engine.device import ON_CPU, Placement
from engine.gpu_memory.profile import GpuCacheSizer
from engine.grammar_manager import GrammarManager
from engine.kv_geometry import fingerprint, kv_spec, longest_sequence
from engine.models.decoder import Decoder
from engine.profiling.limits import Limits
from engine.profiling.session import ProfileSession
from engine.sampler import SampledToken, needs_host, sample
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_pace import StepPace
from engine.scheduling.step_plan import ScheduledChunk, StepPlan
from engine.sequence import Sequence
from engine.step_runner import ComputingStep
from engine.tensor_parallel.group import TensorParallelGroup
from engine.tensor_parallel.shard import plan_shard
from engine.weights.open import open_model
from mesh.config import WorkerConfig
from mesh.errors import ConfigError, GrammarFailed
from mesh.model_text.model_files import resolve_model
from mesh.telemetry import metrics

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
    computed: list[ScheduledChunk]
    """Chunks that were computed of sequences that go on (their finished blocks can be sent)."""
    reserved: list[Sequence]
    """Sequences that now hold blocks for KV from a prefill worker."""
    expired: list[Sequence]
    """Sequences dropped at their deadline; their blocks are free."""
    shed: Sequence | None
    """A computed sequence to give up, see ``StepPlan``."""
    failed: list[tuple[Sequence, GrammarFailed]]
    """Sequences that cannot go on, still running: the caller ends them."""
    num_tokens: int
    """Computed."""
    has_launched: bool
    """Whether a step computes now: another ``step`` should follow at once."""

    @property
    def has_worked(self) -> bool:
        """Whether there was anything to compute."""
        return bool(self.num_tokens) or self.has_launched


@dataclass(slots=True, frozen=True)
class _Launched:
    """A step that is computed now."""

    plan: StepPlan
    sampled: list[Sequence]
    host_rows: list[int]
    """Those of ``sampled`` that the host chooses a token for."""
    step: ComputingStep
    num_tokens: int
    start_s: float


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
        overlap: bool | None = None,
    ) -> None:
        """Load the model and allocate the cache; of several ranks, this one's part of both.

        Args:
            config: this worker's.
            backend: runs the model.
            group: the ranks among which it is divided; None: it is whole.
            sizer: decides the number of KV blocks; None: the configuration does.
            placement: what the backend computes on, for those who ask.
            overlap: Plan each step while the one before it is computed. None: where that happens
                on another device than the planning.

        Raises:
            ConfigError: the model or the cache size is unusable; says which number to change.
        """
        files = resolve_model(config.model)
        self.model_config, source = open_model(files)
        self.placement = placement
        max_model_len = longest_sequence(config, self.model_config)
        self.group = group = group or TensorParallelGroup()
        self.shard = plan_shard(self.model_config, group.rank, group.size, config.weights)
        self.kv_spec = kv_spec(config, self.model_config, self.shard, backend.default_kv_dtype)
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
        self.pace = StepPace(config.max_step_ms / 1000, config.max_batched_tokens)
        self.scheduler = Scheduler(
            BlockPool(self.kv_spec.num_blocks),
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
            prefill_only=config.role == "prefill",
            pace=self.pace,
        )
        self.grammars = GrammarManager(files, self.model_config.vocab_size)
        self.fingerprint = fingerprint(
            self.model_config, weights_hash, self.kv_spec, backend.kv_layout
        )
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
        self.broadcast: Callable[[BatchInputs, int], None] | None = None
        """Tells the other ranks what is computed next, and in a graph of how many rows."""
        self.num_forwards = 0
        """Steps launched."""
        self.step_time_s = 0.0
        self.tokens_per_s = 0.0
        self.max_sequence_tokens = min(max_model_len, self.scheduler.max_tokens_per_sequence())
        """Prompt plus output tokens that a single request can ever hold here."""
        on_device = backend.device.type != "cpu"
        self._overlap = on_device if overlap is None else overlap
        self._draws_on_host = not (on_device or self._overlap)
        self._launched: _Launched | None = None
        self._last_done_s = 0.0
        self.runner = backend.step_runner(
            StepSizes(
                num_tokens=config.max_batched_tokens,
                num_sequences=self.scheduler.max_num_seqs,
                num_blocks=-(-self.max_sequence_tokens // config.block_size),
                vocab_size=self.model_config.vocab_size,
            ),
            group,
        )

    def step(self, on_group: OnLayerGroup | None = None) -> StepOutcome:
        """Schedule, compute, sample. Cheap when there is nothing to do.

        With ``overlap`` the outcome is of the step before: while that one was computed, this one
        was planned and launched. ``on_group`` is called during the forward, each time that a group
        of layers has written the step's KV.
        """
        if self.profile is not None:
            return self.profile.step(self._step, on_group)
        return self._step(on_group)

    @torch.inference_mode()
    def _step(self, on_group: OnLayerGroup | None) -> StepOutcome:
        before, plan = self._launched, StepPlan()
        if before is None or self._may_run_ahead(before):
            plan = self.scheduler.schedule()
        launched = self._launch(plan, on_group) if plan.chunks else None
        done, self._launched = before, launched
        if before is None and launched is not None and not self._may_run_ahead(launched):
            done, self._launched = launched, None
        results, failed = ([], []) if done is None else self._collect(done)
        computed = [] if done is None else done.plan.chunks
        return StepOutcome(
            results=results,
            computed=[chunk for chunk in computed if chunk.sequence.is_running],
            reserved=plan.reserved,
            expired=plan.expired,
            shed=plan.shed,
            failed=failed,
            num_tokens=0 if done is None else done.num_tokens,
            has_launched=self._launched is not None,
        )

    def _may_run_ahead(self, launched: _Launched) -> bool:
        """Whether the next step may be planned before this one is done."""
        on_host = bool(launched.host_rows)
        return self._overlap and not on_host and self.scheduler.can_run_ahead()

    def _launch(self, plan: StepPlan, on_group: OnLayerGroup | None) -> _Launched:
        start_s = time.monotonic()
        for chunk in plan.chunks:
            if not chunk.sequence.first_step_s:
                chunk.sequence.first_step_s = start_s
        batch = self._build_batch(plan.chunks, self.scheduler.block_size)
        sampled = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        host_rows = [
            row
            for row, sequence in enumerate(sampled)
            if self._draws_on_host or needs_host(sequence)
        ]
        on_kv_written = None if on_group is None else self._by_group(plan.chunks, on_group)
        self.grammars.begin(sampled)
        self.num_forwards += 1
        if self.broadcast is not None:
            self.broadcast(batch, self.runner.graph_rows(self.model, batch, on_kv_written))
        step = self.runner.launch(self.model, batch, sampled, host_rows, on_kv_written)
        self.scheduler.launch(plan)
        return _Launched(plan, sampled, host_rows, step, batch.num_tokens, start_s)

    def _collect(
        self, launched: _Launched
    ) -> tuple[list[StepResult], list[tuple[Sequence, GrammarFailed]]]:
        """Wait for a step's tokens and append them to the sequences that still want them."""
        output = launched.step.finish()
        on_host = [launched.sampled[row] for row in launched.host_rows]
        late, failed = self.grammars.collect(s for s in on_host if s.is_answering)
        unsampled = {*late, *(sequence for sequence, _ in failed)}
        self.scheduler.step_done(launched.plan, late=late)
        tokens = [SampledToken(token_id, None) for token_id in output.token_ids]
        rows = [
            row
            for row, sequence in enumerate(on_host)
            if sequence.is_answering and sequence not in unsampled
        ]
        if rows:
            logits = output.logits if len(rows) == len(on_host) else output.logits[rows]
            drawn = self._sample(logits, [on_host[row] for row in rows])
            for row, token in zip(rows, drawn, strict=True):
                tokens[launched.host_rows[row]] = token
        results: list[StepResult] = []
        for sequence, token in zip(launched.sampled, tokens, strict=True):
            if sequence.is_answering and sequence not in unsampled:
                sequence.append(token.token_id)
                results.append(StepResult(sequence, token))
        self._observe(launched)
        return results, failed

    @torch.inference_mode()
    def follow(
        self, batch: BatchInputs, graph_rows: int, on_group: Callable[[int], None] | None = None
    ) -> ComputingStep:
        """Begin this rank's part of a step that rank 0 broadcast.

        ``on_group`` is called with the index of each group of layers whose KV is written.
        """
        on_kv_written = None if on_group is None else self._each_group(on_group)
        return self.runner.follow(self.model, batch, graph_rows, on_kv_written)

    @property
    def num_steps_done(self) -> int:
        """The number of the step whose outcome or layers ``step`` told of last."""
        return self.num_forwards - (self._launched is not None)

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
        def running(group: int) -> None:
            on_group([chunk for chunk in chunks if chunk.sequence.is_running], group)

        return self._each_group(running)

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

    def _observe(self, launched: _Launched) -> None:
        """Count a step that has just ended; it began when the one before it had ended."""
        now_s, num_tokens = time.monotonic(), launched.num_tokens
        seconds = now_s - max(launched.start_s, self._last_done_s)
        self._last_done_s = now_s
        _STEP_TOKENS.observe(num_tokens)
        self.pace.observe(num_tokens, seconds)
        if self.step_time_s == 0.0:
            self.step_time_s, self.tokens_per_s = seconds, num_tokens / seconds
            return
        self.step_time_s += _EWMA_WEIGHT * (seconds - self.step_time_s)
        self.tokens_per_s += _EWMA_WEIGHT * (num_tokens / seconds - self.tokens_per_s)
