"""A group of several ranks over torch.distributed: NCCL on CUDA, else gloo.

The process group is an object of its own, not torch's default one: nothing global, and a test can
hold several in one process. The store through which the ranks find each other, and gloo's sockets,
listen on the loopback device only: the ranks of a worker live on one host.
"""

from __future__ import annotations

import datetime
import socket
from typing import Any

import torch
import torch.distributed as dist

from engine.tensor_parallel.group import TensorParallelGroup
from mesh.errors import ConfigError

LOOPBACK = "127.0.0.1"
CONNECT_TIMEOUT_S = 120.0
"""Longest until all ranks have come."""
START_TIMEOUT_S = 3600.0
"""Longest that one operation may take while ranks load weights and compile kernels."""
STEP_TIMEOUT_S = 60.0
"""The same later. A dead rank is noticed long before, by its closed sockets; a frozen one by this.
"""


def listen() -> socket.socket:
    """The socket of rank 0's store; tell the others its port."""
    return socket.create_server((LOOPBACK, 0))


class DistributedGroup(TensorParallelGroup):
    """For one thread at a time. A lost rank makes every operation raise RuntimeError.

    On CUDA an operation is only launched here: NCCL's stream waits for the current one, and
    ``wait`` makes the current one wait for NCCL's, both by events. So it can be captured in a
    graph, within which NCCL's stream forks off and joins again. Torch keeps captured operations
    from its watchdog (pytorch#102542), so a replayed one has no timeout; the watchdog's queries of
    those launched before do not disturb a capture (pytorch#148594).
    """

    def __init__(
        self,
        rank: int,
        size: int,
        port: int,
        device: torch.device,
        *,
        listener: socket.socket | None = None,
    ) -> None:
        """Wait until every rank has come, or ``CONNECT_TIMEOUT_S``.

        Args:
            rank: This process's number.
            size: How many there are.
            port: Where rank 0's store listens on the loopback device.
            device: Where the model's tensors are.
            listener: Rank 0's socket from ``listen``; the store owns it then.

        Raises:
            ConfigError: the ranks did not find each other.
        """
        self.rank, self.size = rank, size
        self._device = device
        self._timeout = datetime.timedelta(seconds=START_TIMEOUT_S)
        timeout = datetime.timedelta(seconds=CONNECT_TIMEOUT_S)
        try:
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                LOOPBACK, port, size, rank == 0, timeout,
                wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
            )  # fmt: skip
            self._group = _process_group(self._store, rank, size, device, self._timeout)
            self.least(0)  # connects everyone: a missing rank is an error here, not in a step
        except RuntimeError as error:
            text = str(error).partition("\n")[0]
            raise ConfigError(f"tensor_parallel: rank {rank} of {size}: {text}") from error

    def expect_steps(self) -> None:
        self._timeout = datetime.timedelta(seconds=STEP_TIMEOUT_S)
        self._group._set_default_timeout(self._timeout)  # NCCL's watchdog goes by this one

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.num_all_reduces += 1
        options = dist.AllreduceOptions()
        options.timeout = self._timeout
        self._group.allreduce([x], options).wait()
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.num_gathers += 1
        options = dist.GatherOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        self._group.gather([parts] if parts else [], [x], options).wait()
        return parts

    def broadcast(self, x: torch.Tensor) -> None:
        self.num_broadcasts += 1
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        self._group.broadcast([x], options).wait()

    def least(self, value: int) -> int:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        options.timeout = self._timeout
        tensor = torch.tensor([value], dtype=torch.int64, device=self._device)
        self._group.allreduce([tensor], options).wait()
        return int(tensor.item())


def _process_group(
    store: Any, rank: int, size: int, device: torch.device, timeout: datetime.timedelta
) -> Any:
    """A ``torch.distributed.Backend``, whose operations torch's type stubs do not know."""
    backends: Any = dist
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = backends.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return backends.ProcessGroupNCCL(store, rank, size, options)
    gloo = backends.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=LOOPBACK)]
    options._timeout = timeout
    options._threads = 1  # one operation at a time
    return gloo(store, rank, size, options)
