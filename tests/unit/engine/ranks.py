"""Engines of several tensor-parallel ranks, one thread each, over real gloo."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from engine.backends.cpu.backend import CpuBackend
from engine.batch import BatchInputs
from engine.engine import Engine
from engine.tensor_parallel.distributed_group import DistributedGroup, listen
from mesh.config import WorkerConfig


class Ranks:
    """Owns the engines of all ranks; ``lead`` is stepped, the others follow. A context manager."""

    def __init__(self, config: WorkerConfig, size: int) -> None:
        """Load every rank's part.

        Raises:
            ConfigError: the model can't be divided so.
        """
        listener = listen()
        port = listener.getsockname()[1]
        with ThreadPoolExecutor(size) as pool:
            self.engines = list(
                pool.map(
                    lambda rank: _load(config, rank, size, port, listener if rank == 0 else None),
                    range(size),
                )
            )
        self.lead = self.engines[0]
        self._batches: list[queue.SimpleQueue[BatchInputs | None]] = []
        self._threads = []
        for engine in self.engines[1:]:
            batches: queue.SimpleQueue[BatchInputs | None] = queue.SimpleQueue()
            thread = threading.Thread(target=_follow, args=(engine, batches.get))
            thread.start()
            self._batches.append(batches)
            self._threads.append(thread)
        self.lead.broadcast = self._broadcast

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for batches in self._batches:
            batches.put(None)
        for thread in self._threads:
            thread.join()

    def _broadcast(self, batch: BatchInputs, graph_rows: int) -> None:
        assert not graph_rows
        for batches in self._batches:
            batches.put(batch)


def _load(config: WorkerConfig, rank: int, size: int, port: int, listener: object) -> Engine:
    group = DistributedGroup(rank, size, port, torch.device("cpu"), listener=listener)  # type: ignore[arg-type]
    return Engine(config, CpuBackend(config.weights, 1), group)  # type: ignore[arg-type]


@torch.inference_mode()
def _follow(engine: Engine, next_batch: Callable[[], BatchInputs | None]) -> None:
    while (batch := next_batch()) is not None:
        engine.follow(batch, 0).finish()
