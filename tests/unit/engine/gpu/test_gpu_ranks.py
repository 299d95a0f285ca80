"""Two ranks on the GPU's kernels give the tokens of one process."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.tensor_parallel.distributed_group import DistributedGroup, listen
from engine.tensor_parallel.step_wire import StepSender
from tests.unit.engine.families import random_model
from tests.unit.engine.gpu import follower_process
from tests.unit.engine.gpu.gpu_engines import gpu_engine
from tests.unit.engine.tiny_llama import generate, new_sequence, random_prompt

_ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("family", ["llama-bias-untied", "qwen3-moe"])
def test_two_ranks_answer_as_one(family: str, tmp_path: Path) -> None:
    random_model(family, tmp_path)
    prompts = [random_prompt(length, seed=2) for length in (1, 29)]
    alone = gpu_engine(tmp_path, overlap=False, prepare=False)
    expected = generate(alone, *(new_sequence(prompt, 4) for prompt in prompts))
    listener = listen()
    port = listener.getsockname()[1]
    ours, theirs = socket.socketpair()
    argv = [sys.executable, "-m", follower_process.__name__, str(tmp_path), "fp32", str(port)]
    with theirs:
        follower = subprocess.Popen(
            [*argv, str(theirs.fileno())], pass_fds=[theirs.fileno()], cwd=_ROOT
        )
    try:
        group = DistributedGroup(0, 2, port, torch.device("cpu"), listener=listener)
        engine = follower_process.load(str(tmp_path), "fp32", group)
        engine.announce = StepSender([ours])
        answers = generate(engine, *(new_sequence(prompt, 4) for prompt in prompts))
        assert answers == expected
        assert group.num_all_reduces == engine.num_forwards * (1 + 2 * 3)
        ours.close()
        assert follower.wait(20) == 0
    finally:
        ours.close()
        follower.kill()
        follower.wait()
