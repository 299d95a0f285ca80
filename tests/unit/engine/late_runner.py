"""A device that is as late as it may be: it computes a step only when the host waits for it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from engine.backend import StepSizes
from engine.backends.cpu.backend import CpuBackend
from engine.batch import BatchInputs
from engine.models.decoder import Decoder
from engine.sequence import Sequence
from engine.step_runner import ComputingStep, HostRunner, OnKVWritten, StepOutput, StepRunner
from engine.tensor_parallel.group import TensorParallelGroup


class LateBackend(CpuBackend):
    """The CPU backend with such a runner."""

    def step_runner(self, sizes: StepSizes, group: TensorParallelGroup | None = None) -> StepRunner:
        return LateRunner()


class LateRunner:
    """Implements ``StepRunner``; steps are computed in the order of their launch."""

    def __init__(self) -> None:
        self._host = HostRunner()
        self._steps: deque[Callable[[], StepOutput]] = deque()
        self.most_launched = 0

    def prepare(self, model: Decoder) -> None:
        pass

    def graph_rows(
        self, model: Decoder, batch: BatchInputs, on_kv_written: OnKVWritten | None
    ) -> int:
        return 0

    def launch(
        self, model: Decoder, batch: BatchInputs, sequences: SequenceOf[Sequence],
        host_rows: SequenceOf[int], on_kv_written: OnKVWritten | None = None,
    ) -> ComputingStep:  # fmt: skip
        as_launched = [copy.copy(sequence) for sequence in sequences]
        for sequence in as_launched:
            sequence.token_ids = list(sequence.token_ids)
        rows = list(host_rows)

        def compute() -> StepOutput:
            return self._host.launch(model, batch, as_launched, rows, on_kv_written).finish()

        return self._add(compute)

    def follow(
        self, model: Decoder, batch: BatchInputs, graph_rows: int,
        on_kv_written: OnKVWritten | None = None,
    ) -> ComputingStep:  # fmt: skip
        return self._add(
            lambda: self._host.follow(model, batch, graph_rows, on_kv_written).finish()
        )

    def _add(self, compute: Callable[[], StepOutput]) -> ComputingStep:
        self._steps.append(compute)
        self.most_launched = max(self.most_launched, len(self._steps))
        return _LateStep(self._steps, compute)


class _LateStep:
    def __init__(
        self, steps: deque[Callable[[], StepOutput]], compute: Callable[[], StepOutput]
    ) -> None:
        self._steps = steps
        self._compute = compute
        self._was_asked = False

    def is_done(self) -> bool:
        was_asked, self._was_asked = self._was_asked, True
        return was_asked

    def finish(self) -> StepOutput:
        assert self._steps.popleft() is self._compute, "finished out of order"
        return self._compute()
