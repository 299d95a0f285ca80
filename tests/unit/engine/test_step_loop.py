"""A follower launches the next step before it waits for the last, and no step too many."""

from __future__ import annotations

import socket

import pytest

from engine.batch import BatchInputs, build_batch
from engine.engine import Engine
from engine.step_loop import follow_steps
from engine.tensor_parallel.step_progress import StepProgress
from engine.tensor_parallel.step_wire import StepReceiver, StepSender
from tests.unit.engine.late_runner import LateRunner
from tests.unit.engine.tiny_llama import TinyLlama, new_sequence, random_prompt


def _batch(engine: Engine) -> BatchInputs:
    """A prompt's."""
    engine.scheduler.add(new_sequence(random_prompt(20, seed=1)))
    return build_batch(engine.scheduler.schedule().chunks, engine.scheduler.block_size)


def test_at_most_two_steps_are_launched(tiny_llama: TinyLlama) -> None:
    engine = tiny_llama.engine(overlap=True)
    batch, progress = _batch(engine), StepProgress()
    ours, theirs = socket.socketpair()
    done: list[int] = []
    with theirs:
        send = StepSender([ours])
        for _ in range(3):
            send(batch, 0)
        progress.on_change = lambda: done.append(len(done) + 1)
        ours.close()
        with pytest.raises(EOFError):
            follow_steps(engine, StepReceiver(theirs), progress)
    assert done == [1, 2], "each once the next was launched"
    assert not progress.has_reached(3, None)
    assert isinstance(engine.runner, LateRunner)
    assert engine.runner.most_launched == 2


def test_the_last_step_ends_without_another(tiny_llama: TinyLlama) -> None:
    engine = tiny_llama.engine(overlap=True)
    batch, progress = _batch(engine), StepProgress()
    ours, theirs = socket.socketpair()
    with theirs:
        StepSender([ours])(batch, 0)
        progress.on_change = ours.close
        with pytest.raises(EOFError):
            follow_steps(engine, StepReceiver(theirs), progress)
    assert progress.has_reached(1, None)
    assert engine.kv_memory.raw.any()


def test_groups_of_layers_are_told_of_where_launching_is_computing(tiny_llama: TinyLlama) -> None:
    engine = tiny_llama.engine(kv_layer_groups=2)
    batch, progress = _batch(engine), StepProgress()
    ours, theirs = socket.socketpair()
    reached: list[list[bool]] = []
    with theirs:
        StepSender([ours])(batch, 0)
        ours.close()
        progress.on_change = lambda: reached.append(
            [progress.has_reached(1, part) for part in (0, 1, None)]
        )
        with pytest.raises(EOFError):
            follow_steps(engine, StepReceiver(theirs), progress, by_group=True)
    assert reached == [[True, False, False], [True, True, False], [True, True, True]]
