"""Rank 1 of two on the GPU's kernels: ``python -m … FOLDER WEIGHTS PORT STEP_FD``."""

from __future__ import annotations

import os
import socket
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from engine.backends.gpu.backend import GpuBackend
from engine.backends.gpu.device import HostDevice
from engine.engine import Engine
from engine.tensor_parallel.distributed_group import DistributedGroup
from engine.tensor_parallel.step_wire import StepReceiver
from mesh.config import WorkerConfig


def load(folder: str, weights: str, group: DistributedGroup) -> Engine:
    """A rank's part of a model, in the interpreter."""
    config = WorkerConfig(
        role="decode", worker_id="w", redis_url="redis://localhost", model=folder,
        weights=weights, kv_blocks=24, max_num_seqs=6, max_batched_tokens=48, max_model_len=128,
        tensor_parallel=2,
    )  # type: ignore[arg-type]  # fmt: skip
    return Engine(config, GpuBackend(weights, HostDevice()), group)  # type: ignore[arg-type]


def main(folder: str, weights: str, port: str, step_fd: str) -> None:
    """Follow until rank 0 is gone."""
    group = DistributedGroup(1, 2, int(port), torch.device("cpu"))
    engine = load(folder, weights, group)
    receiver = StepReceiver(socket.socket(fileno=int(step_fd)))
    try:
        while (batch := receiver.next(None)) is not None:
            engine.follow(batch)
    except EOFError:
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
