"""One profile: begun by the control loop, run by the model thread, for a number of steps.

    WAITING ── a step begins ──▶ RUNNING ── enough steps, or time is up ──▶ DONE
       └────────── time is up, or the caller left ──────────────────────────▶ DONE

Everything but ``cancel`` happens on the model thread: PyTorch's profiler belongs to the thread that
started it. Stopping it and measuring the machine's limits hold the next step up, some tenths of a
second in all; reading the result does not, and is the caller's.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from engine.profiling.limits import Limits, measure_limits
from engine.profiling.ops import OpLog, ranged, with_ranges

if TYPE_CHECKING:
    from engine.engine import Engine, OnLayerGroup, StepOutcome

MAX_STEPS = 200


class _State(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()


@dataclass(slots=True)
class StepTimes:
    """Where the wall clock went, from the first step's begin to the last one's end."""

    in_steps_s: float = 0.0
    between_s: float = 0.0
    """Between steps, with sequences to compute."""
    waiting_s: float = 0.0
    """Between steps, with sequences that waited: for KV, room, or a link."""
    idle_s: float = 0.0
    """Between steps, with nothing to do."""
    num_steps: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class ProfileData:
    """What a profile found; not digested yet."""

    times: StepTimes
    log: OpLog
    profiler: profile | None
    """Stopped; None where no step came."""
    limits: Limits | None = None


@dataclass(slots=True)
class ProfileSession:
    """Give it to ``Engine.profile``; ``on_done`` is called once, on the model thread."""

    engine: Engine
    num_steps: int
    deadline_s: float
    """``time.monotonic()``."""
    on_done: Callable[[ProfileData], None]
    data: ProfileData = field(init=False)
    _state: _State = _State.WAITING
    _is_cancelled: bool = False
    _ended_s: float = 0.0
    _after: str = ""

    def __post_init__(self) -> None:
        with_nvtx = self.engine.device.type == "cuda"
        self.data = ProfileData(StepTimes(), OpLog(self.engine.kv_spec, with_nvtx), None)

    def cancel(self) -> None:
        """Nobody waits for it any more; from any thread."""
        self._is_cancelled = True

    def step(self, run: Callable[[OnLayerGroup | None], StepOutcome],
             on_group: OnLayerGroup | None) -> StepOutcome:  # fmt: skip
        """Run one step of the engine under the profiler."""
        if self._is_over():
            self._finish()
            return run(on_group)
        if self._state is _State.WAITING:
            self._start()
        start_s = time.monotonic()
        with record_function("step"):
            outcome = run(on_group)
        self._count(outcome, start_s, time.monotonic())
        if self._is_over():
            self._finish()
        return outcome

    def rest(self) -> None:
        """There is nothing to compute: look whether to go on waiting."""
        if self._state is not _State.DONE and self._is_over():
            self._finish()

    def _is_over(self) -> bool:
        enough = self.data.times.num_steps >= self.num_steps
        return enough or self._is_cancelled or time.monotonic() >= self.deadline_s

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.data.log.with_nvtx:
            activities.append(ProfilerActivity.CUDA)
        self.data.profiler = profile(activities=activities)
        self.data.profiler.start()
        self._state = _State.RUNNING
        log = self.data.log
        self.engine.instrument(
            with_ranges(self.engine.model, log), lambda function, op: ranged(function, op, log)
        )

    def _count(self, outcome: StepOutcome, start_s: float, end_s: float) -> None:
        times, scheduler = self.data.times, self.engine.scheduler
        if times.num_steps:
            gap_s = start_s - self._ended_s
            match self._after:
                case "running":
                    times.between_s += gap_s
                case "waiting":
                    times.waiting_s += gap_s
                case _:
                    times.idle_s += gap_s
        if outcome.has_worked or times.num_steps:
            times.in_steps_s += end_s - start_s if outcome.has_worked else 0.0
            times.waiting_s += 0.0 if outcome.has_worked else end_s - start_s
            self._ended_s = end_s
        times.num_steps += bool(outcome.num_tokens)
        times.num_tokens += outcome.num_tokens
        self._after = (
            "running" if scheduler.num_running else "waiting" if scheduler.num_waiting else ""
        )

    def _finish(self) -> None:
        self._state = _State.DONE
        self.engine.profile = None
        if self.data.profiler is not None:
            self.engine.end_instrument()
            if self.data.log.with_nvtx:
                torch.cuda.synchronize()
            self.data.profiler.stop()
        if self.data.times.num_steps and not self._is_cancelled:
            if self.engine.limits is None:
                model = self.engine.model
                self.engine.limits = measure_limits(
                    self.engine.device, model.a_product, model.config.hidden_size,
                    model.backend.activation_dtype,
                )  # fmt: skip
            self.data.limits = self.engine.limits
        self.on_done(self.data)
