"""Runs the model for one step: from a batch on the host to its tokens on the host.

``launch`` returns as soon as it can; ``finish`` waits. Between the two a device computes and the
host plans the next step, whose pending tokens the runner takes from where it sampled them.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.batch import BatchInputs
from engine.models.decoder import Decoder
from engine.sampler import sample
from engine.sequence import Sequence

OnKVWritten = Callable[[int], None]
"""Called with each layer's index, in order, once the batch's KV of it is in place."""


@dataclass(slots=True, frozen=True)
class StepOutput:
    """What a step computed, on the host. N rows are sampled, in the batch's order."""

    token_ids: list[int]
    """[N]; those of the host's rows mean nothing."""
    logits: torch.Tensor
    """[host rows, V] float32; the caller's, to change at will."""


class ComputingStep(Protocol):
    """A launched step. Finish it once, in the order of the launches."""

    def is_done(self) -> bool:
        """Whether ``finish`` would not wait."""
        ...

    def finish(self) -> StepOutput:
        """Wait until it is done; KV written is told of by then."""
        ...


class StepRunner(Protocol):
    """Owns what lies between two steps of one engine: the last step's tokens, buffers, graphs."""

    def prepare(self, model: Decoder) -> None:
        """What is better done before the first request than during it; nothing is launched.

        Of several ranks all do it at the same time: they compute together.
        """
        ...

    def graph_rows(
        self, model: Decoder, batch: BatchInputs, on_kv_written: OnKVWritten | None
    ) -> int:
        """Rows of the captured graph that ``launch`` will replay for these; 0: it will use none."""
        ...

    def launch(
        self, model: Decoder, batch: BatchInputs, sequences: SequenceOf[Sequence],
        host_rows: SequenceOf[int], on_kv_written: OnKVWritten | None = None,
    ) -> ComputingStep:  # fmt: skip
        """Begin to compute a step; at most one other one is not finished.

        Args:
            model: What to run, the plain model or an instrumented one.
            batch: What to compute.
            sequences: Those of the sampled rows, before ``Scheduler.launch``.
            host_rows: Indices of rows whose logits the host wants, to sample them itself.
            on_kv_written: Called here or in ``finish``, as the device's pace allows.
        """
        ...

    def follow(
        self, model: Decoder, batch: BatchInputs, graph_rows: int,
        on_kv_written: OnKVWritten | None = None,
    ) -> ComputingStep:  # fmt: skip
        """Begin this rank's part of a step that rank 0 launches; its tokens are rank 0's.

        Args:
            model: The plain model.
            batch: What to compute.
            graph_rows: What rank 0's runner says of the step.
            on_kv_written: As of ``launch``, without a graph.
        """
        ...


class HostRunner:
    """Implements ``StepRunner`` where the host itself computes: at once, within ``launch``."""

    def __init__(self) -> None:
        self._last_tokens = np.empty(0, np.int64)

    def prepare(self, model: Decoder) -> None:
        """Nothing: there are no graphs, and warming up compiles the kernels."""

    def graph_rows(
        self, model: Decoder, batch: BatchInputs, on_kv_written: OnKVWritten | None
    ) -> int:
        return 0

    def launch(
        self, model: Decoder, batch: BatchInputs, sequences: SequenceOf[Sequence],
        host_rows: SequenceOf[int], on_kv_written: OnKVWritten | None = None,
    ) -> ComputingStep:  # fmt: skip
        pending = batch.token_sources >= 0
        if pending.any():
            batch.token_ids[pending] = self._last_tokens[batch.token_sources[pending]]
        logits = model.forward(batch, on_kv_written)
        if len(host_rows) == len(sequences):
            return _Computed(StepOutput([0] * len(sequences), logits))
        wanted = logits[list(host_rows)]
        on_host = set(host_rows)
        rows = [row for row in range(len(sequences)) if row not in on_host]
        self._last_tokens = np.zeros(len(sequences), np.int64)
        drawn = sample(logits[rows], [sequences[row] for row in rows])
        self._last_tokens[rows] = [token.token_id for token in drawn]
        return _Computed(StepOutput(self._last_tokens.tolist(), wanted))

    def follow(
        self, model: Decoder, batch: BatchInputs, graph_rows: int,
        on_kv_written: OnKVWritten | None = None,
    ) -> ComputingStep:  # fmt: skip
        assert not graph_rows
        assert (batch.token_sources < 0).all(), "rank 0 does not run ahead of a host"
        return _Computed(StepOutput([], model.forward(batch, on_kv_written)))


@dataclass(slots=True, frozen=True)
class _Computed:
    output: StepOutput

    def is_done(self) -> bool:
        return True

    def finish(self) -> StepOutput:
        return self.output
