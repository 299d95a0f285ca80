"""Two ranks on the GPU's kernels, in graphs and planned ahead, give the tokens of one, alone."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.engine import Engine
from engine.sequence import Sequence
from engine.tensor_parallel.distributed_group import DistributedGroup, listen
from engine.tensor_parallel.step_wire import StepSender
from tests.unit.engine.families import random_model
from tests.unit.engine.gpu import follower_process
from tests.unit.engine.gpu.gpu_engines import gpu_engine, runner
from tests.unit.engine.tiny_llama import finish_ended, generate, new_sequence, random_prompt

_ROOT = Path(__file__).parents[4]
_NUM_LAYERS = 3
_ABORTED = 2


@contextlib.contextmanager
def _two_ranks(folder: Path, *fault: str) -> Iterator[Engine]:
    """Rank 0; the other one follows in a process of its own, and has ended well afterwards."""
    listener = listen()
    port = listener.getsockname()[1]
    ours, theirs = socket.socketpair()
    argv = [sys.executable, "-m", follower_process.__name__, str(folder), "fp32", str(port)]
    with theirs:
        follower = subprocess.Popen(
            [*argv, str(theirs.fileno()), *fault], pass_fds=[theirs.fileno()], cwd=_ROOT
        )
    try:
        group = DistributedGroup(0, 2, port, torch.device("cpu"), listener=listener)
        engine = follower_process.load(str(folder), "fp32", group)
        engine.broadcast = StepSender([ours])
        yield engine
        ours.close()
        assert follower.wait(20) == 0
    finally:
        ours.close()
        follower.kill()
        follower.wait()


def _sequences() -> list[Sequence]:
    """Greedy ones, drawn ones, and one that the host samples by penalties; one is over a step."""
    kinds: list[tuple[int, int, dict[str, float]]] = [
        (5, 8, {}), (50, 6, {"temperature": 0.9, "top_k": 11}), (9, 9, {}),
        (20, 4, {"repetition_penalty": 1.4}), (3, 7, {"temperature": 0.8}),
    ]  # fmt: skip
    return [
        new_sequence(
            random_prompt(length, seed=2), max_tokens, arrival_s=float(index), seed=index, **kind
        )
        for index, (length, max_tokens, kind) in enumerate(kinds)
    ]


def _answers(engine: Engine) -> list[list[int]]:
    """Sequences come at every other step, and one is given up in the middle of its answer."""
    sequences = _sequences()
    waiting = list(sequences)
    for number in range(2 * len(sequences)):
        if number % 2 == 0:
            engine.scheduler.add(waiting.pop(0))
        for result in engine.step().results:
            sequence = result.sequence
            is_given_up = sequence is sequences[_ABORTED] and sequence.num_output_tokens == 2
            if sequence.finish_reason is not None or is_given_up:
                engine.scheduler.finish(sequence)
    finish_ended(engine)
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]


def test_a_load_with_an_abort_is_answered_as_by_one_rank(tmp_path: Path) -> None:
    random_model("llama-bias-untied", tmp_path)
    expected = _answers(_alone(tmp_path))
    assert [len(answer) for answer in expected] == [8, 6, 2, 4, 7]
    with _two_ranks(tmp_path) as engine:
        assert _answers(engine) == expected
        num_steps, num_replayed = engine.num_forwards, runner(engine).num_replayed
        assert 2 < num_replayed < num_steps - 2
        group = engine.group
        assert group.num_all_reduces == num_steps * (1 + 2 * _NUM_LAYERS)
        assert group.num_gathers == group.num_broadcasts <= num_steps


def test_experts_are_computed_without_graphs(tmp_path: Path) -> None:
    random_model("qwen3-moe", tmp_path)
    assert _few_answers_of_two(tmp_path) == _few_answers(_alone(tmp_path))


def test_a_rank_that_misses_the_drawn_tokens_is_noticed(tmp_path: Path) -> None:
    random_model("llama-bias-untied", tmp_path)
    assert _few_answers_of_two(tmp_path, "deaf") != _few_answers(_alone(tmp_path))


def _alone(folder: Path) -> Engine:
    return gpu_engine(folder, overlap=False, prepare=False)


def _few_answers(engine: Engine) -> list[list[int]]:
    prompts = [random_prompt(length, seed=2) for length in (1, 29)]
    return generate(engine, *(new_sequence(prompt, 4) for prompt in prompts))


def _few_answers_of_two(folder: Path, *fault: str) -> list[list[int]]:
    with _two_ranks(folder, *fault) as engine:
        return _few_answers(engine)
