"""Rank 1 of two on the GPU's kernels: ``python -m … FOLDER WEIGHTS PORT STEP_FD [deaf]``."""

from __future__ import annotations

import os
import socket
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from engine.backends.gpu.backend import GpuBackend
from engine.backends.gpu.device import HostDevice
from engine.engine import Engine
from engine.step_loop import follow_steps
from engine.tensor_parallel.distributed_group import DistributedGroup
from engine.tensor_parallel.step_progress import StepProgress
from engine.tensor_parallel.step_wire import StepReceiver
from mesh.config import WorkerConfig


class DeafGroup(DistributedGroup):
    """A rank that keeps what it has instead of what is broadcast."""

    def broadcast(self, x: torch.Tensor) -> None:
        super().broadcast(x.clone())


def load(folder: str, weights: str, group: DistributedGroup) -> Engine:
    """A rank's part of a model, in the interpreter: planned ahead, decodes in graphs."""
    config = WorkerConfig(
        role="decode", worker_id="w", redis_url="redis://localhost", model=folder,
        weights=weights, kv_blocks=24, max_num_seqs=6, max_batched_tokens=48, max_model_len=128,
        tensor_parallel=2,
    )  # type: ignore[arg-type]  # fmt: skip
    backend = GpuBackend(weights, HostDevice())  # type: ignore[arg-type]
    engine = Engine(config, backend, group, overlap=True)
    engine.runner.prepare(engine.model)
    return engine


def main(folder: str, weights: str, port: str, step_fd: str, fault: str = "") -> None:
    """Follow until rank 0 is gone."""
    kind = DeafGroup if fault == "deaf" else DistributedGroup
    engine = load(folder, weights, kind(1, 2, int(port), torch.device("cpu")))
    receiver = StepReceiver(socket.socket(fileno=int(step_fd)))
    try:
        follow_steps(engine, receiver, StepProgress())
    except EOFError:
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
