"""Launches steps on a GPU: copies in, forward, draw, copies out, with no wait in between.

    pinned ──copy──▶ inputs │ pending tokens ← drawn │ forward │ draw → drawn │ ──copy──▶ pinned
                            └───── one CUDA graph for a step of decodes ──────┘           event

Only ``finish`` waits, for the event behind the last copy. Of several ranks the others do the same
without drawing, and every step that samples ends with rank 0's tokens in all ranks' ``drawn``.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch

from engine.backend import StepSizes
from engine.backends.gpu.compile_ahead import steps_to_compile
from engine.backends.gpu.decode_graphs import DecodeGraphs
from engine.backends.gpu.device import Device, Event
from engine.backends.gpu.sampling import Sampler
from engine.backends.gpu.step import StepInputBuffers, is_pure_decode
from engine.batch import BatchInputs
from engine.models.decoder import Decoder
from engine.sequence import Sequence
from engine.step_runner import OnKVWritten, StepOutput
from engine.tensor_parallel.group import TensorParallelGroup

_TOKEN_BYTES = 4
_MOST_LAUNCHED = 2


class GpuRunner:
    """Implements ``StepRunner``."""

    def __init__(
        self, device: Device, inputs: StepInputBuffers, sizes: StepSizes, block_size: int,
        group: TensorParallelGroup | None = None,
    ) -> None:  # fmt: skip
        """Borrow the backend's device and step inputs."""
        self._device = device
        self._sizes = sizes
        self._block_size = block_size
        self._inputs = inputs
        self._sampler = Sampler(device, sizes.num_sequences, sizes.vocab_size)
        self._group = group or TensorParallelGroup()
        self.graphs = DecodeGraphs(device, inputs, self._sampler, sizes, self._group)
        self._model: Decoder | None = None
        self._drawn = [
            device.pinned(sizes.num_sequences * _TOKEN_BYTES).view(torch.int32)
            for _ in range(_MOST_LAUNCHED)
        ]
        self._turn = 0
        self._num_launched = 0
        self.num_replayed = 0
        """Steps that were one graph."""

    def prepare(self, model: Decoder) -> None:
        """See StepRunner: compile every kernel, and capture the decode steps of this model."""
        assert not self._num_launched
        if self._device.compiles:
            self.compile(model, steps_to_compile(self._sizes, self._block_size))
        if model.config.num_experts:
            return  # which experts a token takes is asked of the device in every layer
        self.graphs.capture(model)
        self._model = model

    def compile(self, model: Decoder, batches: SequenceOf[BatchInputs]) -> None:
        """Compute steps whose outcome is of no interest."""
        with torch.inference_mode():
            for batch in batches:
                logits = model.forward(batch)
                if self._group.rank > 0:
                    continue
                num_rows = len(batch.sample_rows)
                rows = self._sampler.stage([], num_rows)
                for is_cut in (False, True):
                    cut = replace(rows, is_cut=is_cut)
                    self._sampler.draw(logits, cut, self._inputs.drawn[:num_rows])

    def graph_rows(
        self, model: Decoder, batch: BatchInputs, on_kv_written: OnKVWritten | None
    ) -> int:
        if model is not self._model or on_kv_written is not None:
            return 0
        return self.graphs.find_size(batch.num_tokens) if is_pure_decode(batch) else 0

    def launch(
        self, model: Decoder, batch: BatchInputs, sequences: SequenceOf[Sequence],
        host_rows: SequenceOf[int], on_kv_written: OnKVWritten | None = None,
    ) -> GpuComputing:  # fmt: skip
        assert self._num_launched < _MOST_LAUNCHED
        self._device.use()
        num_rows = len(sequences)
        marks: list[tuple[int, Event]] = []
        logits: torch.Tensor | None = None
        size = self.graph_rows(model, batch, on_kv_written)
        if size:
            self._inputs.stage_decodes(batch, size)
            rows = self._sampler.stage(sequences, size)
            self.graphs.replay(size, is_cut=rows.is_cut)
            self.num_replayed += 1
            computed = self.graphs.logits[:num_rows]
        else:

            def mark(layer: int) -> None:
                marks.append((layer, self._device.record()))

            computed = model.forward(batch, None if on_kv_written is None else mark)
            if len(host_rows) < num_rows:
                rows = self._sampler.stage(sequences, num_rows)
                self._sampler.draw(computed, rows, self._inputs.drawn[:num_rows])
            if num_rows:
                self._group.broadcast(self._inputs.drawn)
        if host_rows:
            wanted = computed if len(host_rows) == num_rows else computed[list(host_rows)]
            logits = wanted.float().to("cpu", copy=True, non_blocking=True)
        drawn = self._drawn[self._turn][:num_rows]
        drawn.copy_(self._inputs.drawn[:num_rows], non_blocking=True)
        self._turn = (self._turn + 1) % _MOST_LAUNCHED
        self._num_launched += 1
        return GpuComputing(self, marks, on_kv_written, self._device.record(), drawn, logits)

    def follow(
        self, model: Decoder, batch: BatchInputs, graph_rows: int,
        on_kv_written: OnKVWritten | None = None,
    ) -> GpuComputing:  # fmt: skip
        assert self._num_launched < _MOST_LAUNCHED
        assert on_kv_written is None, "only the end of a step says what is in memory"
        self._device.use()
        if graph_rows:
            self._inputs.stage_decodes(batch, graph_rows)
            self.graphs.replay(graph_rows, is_cut=False)
            self.num_replayed += 1
        else:
            model.forward(batch)
            if len(batch.sample_rows):
                self._group.broadcast(self._inputs.drawn)
        self._num_launched += 1
        return GpuComputing(self, [], None, self._device.record(), self._drawn[0][:0], None)

    def _finished(self) -> None:
        self._num_launched -= 1


@dataclass(slots=True, frozen=True)
class GpuComputing:
    """Implements ``ComputingStep``."""

    runner: GpuRunner
    marks: list[tuple[int, Event]]
    on_kv_written: OnKVWritten | None
    done: Event
    drawn: torch.Tensor
    logits: torch.Tensor | None

    def is_done(self) -> bool:
        return self.done.has_passed()

    def finish(self) -> StepOutput:
        for layer, event in self.marks:
            event.wait()
            assert self.on_kv_written is not None
            self.on_kv_written(layer)
        self.done.wait()
        self.runner._finished()
        logits = torch.empty(0) if self.logits is None else self.logits
        return StepOutput(self.drawn.tolist(), logits)
