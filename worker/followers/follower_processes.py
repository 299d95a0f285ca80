"""The processes of ranks 1 … n-1, as rank 0 has them: started, set up, watched, ended.

    start ──▶ setup sent ──▶ every RankReady ──▶ steps ──▶ close
                 └────────── one ends ──▶ lost: the others are killed, and the worker must end

A follower dies with this process, whatever way it ends. The other way round, its end closes its
pipe: all other followers are killed, so that a forward that waits for the dead one in a collective
operation fails at once. Should anything still hold this process up, it ends itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.batch import BatchInputs
from engine.device import DeviceKind
from engine.tensor_parallel.distributed_group import DistributedGroup, listen
from engine.tensor_parallel.step_wire import StepSender
from mesh.config import WorkerConfig
from mesh.errors import PdmeshError
from worker.followers.message_pipe import MessagePipe
from worker.followers.rank_setup import RankReady, RankSetup

EXIT_S = 5.0
"""After the loss of a rank, how long an orderly end may take."""
_STOP_S = 2.0
_ROOT = Path(__file__).resolve().parents[2]

_logger = logging.getLogger(__name__)


class RankLost(PdmeshError):
    """A rank's process ended: without it the model can't be computed."""

    code = "rank_lost"


class FollowerProcesses:
    """Owns the processes and their sockets. Made and closed in the event loop's (main) thread."""

    def __init__(
        self, config: WorkerConfig, device: DeviceKind, module: str, reports: Any, epoch: int
    ) -> None:
        """Start ``config.tensor_parallel - 1`` processes.

        Args:
            config: The worker's.
            device: What all ranks compute on.
            module: What they run, see ``worker.follower``.
            reports: Type of their messages besides ``RankReady``.
            epoch: This start of the worker.
        """
        self.size = config.tensor_parallel
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Holds a RankLost once a follower has ended."""
        self.on_report: Callable[[int, Any], None] = self._unexpected
        """Takes (rank, message); the control loop's."""
        self.on_lost: Callable[[RankLost], None] | None = None
        """Called when ``lost`` is set."""
        self._worker_id = config.worker_id
        self._listener = listen()
        self._port: int = self._listener.getsockname()[1]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[MessagePipe[Any]] = []
        self._ready: dict[int, RankReady] = {}
        self._all_ready = asyncio.Event()
        decoder = msgspec.msgpack.Decoder(RankReady | reports)
        steps = []
        for rank in range(1, self.size):
            pipe, pipe_end = socket.socketpair()
            step, step_end = socket.socketpair()
            with pipe_end, step_end:
                self._processes.append(_spawn(module, pipe_end, step_end))
            self._pipes.append(self._open(rank, pipe, decoder))
            steps.append(step)
            setup = RankSetup(config=config, device=device, rank=rank, port=self._port, epoch=epoch)
            self.send(rank, setup)
        self._steps = steps
        self.broadcast: Callable[[BatchInputs, int], None] = StepSender(steps)
        """Tells every follower of a step; on the model thread."""

    def join(self, device: torch.device) -> DistributedGroup:
        """Make the group, as its rank 0; once, in the thread that computes.

        Raises:
            ConfigError: the ranks did not find each other.
        """
        return DistributedGroup(0, self.size, self._port, device, listener=self._listener)

    def send(self, rank: int, message: msgspec.Struct) -> None:
        """Queue a message to one of them; lost with its process."""
        self._pipes[rank - 1].send(message)

    async def ready(self, fingerprint: str) -> None:
        """Wait until each has loaded its part of the same model.

        Raises:
            RankLost: one has ended, or read another model.
        """
        waiting = asyncio.ensure_future(self._all_ready.wait())
        await asyncio.wait((waiting, self.lost), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self.lost.done():
            self.lost.result()
        for rank, ready in self._ready.items():
            if ready.fingerprint != fingerprint:
                raise RankLost(f"rank {rank} has read another model")

    async def close(self) -> None:
        """End them; what does not end by itself is killed."""
        for pipe in self._pipes:
            pipe.close()
        for step in self._steps:
            step.close()
        self._listener.close()
        await asyncio.to_thread(self._reap, _STOP_S)

    def _open(self, rank: int, end: socket.socket, decoder: Any) -> MessagePipe[Any]:
        return MessagePipe(
            end,
            decoder,
            lambda message: self._on_message(rank, message),
            lambda reason: self._on_closed(rank, reason),
        )

    def _on_message(self, rank: int, message: Any) -> None:
        if isinstance(message, RankReady):
            self._ready[rank] = message
            if len(self._ready) == self.size - 1:
                self._all_ready.set()
        else:
            self.on_report(rank, message)

    def _on_closed(self, rank: int, reason: str) -> None:
        if self.lost.done():
            return
        error = RankLost(f"rank {rank} of {self._worker_id} ended: {self._why(rank, reason)}")
        _logger.error("%s", error)
        self.lost.set_exception(error)
        self.lost.exception()  # whoever awaits it has it; nobody must
        for process in self._processes:
            process.kill()
        last_resort = threading.Timer(EXIT_S, os._exit, (1,))
        last_resort.daemon = True
        last_resort.start()
        if self.on_lost is not None:
            self.on_lost(error)

    def _why(self, rank: int, reason: str) -> str:
        try:  # its socket closes a moment before it can be reaped
            code = self._processes[rank - 1].wait(0.5)
        except subprocess.TimeoutExpired:
            return reason
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _reap(self, timeout_s: float) -> None:
        for process in self._processes:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _unexpected(self, rank: int, message: Any) -> None:
        _logger.warning("unexpected message rank=%d type=%s", rank, type(message).__name__)


def _spawn(module: str, pipe: socket.socket, step: socket.socket) -> subprocess.Popen[bytes]:
    fds = (pipe.fileno(), step.fileno())
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(os.getpid()), *map(str, fds)],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"},
    )
