"""A follower's process: computes its part of every step, and moves its own KV.

    event loop    messages of rank 0, and this rank's transfers (``Side``)
    model thread  batch in → forward, in step with the other ranks

Entry point of ``prefill_worker.follower`` and ``decode_worker.follower``, as which rank 0 starts
it: ``python -m MODULE PARENT_PID PIPE_FD STEP_FD``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from engine.engine import Engine
from engine.step_loop import follow_steps
from engine.tensor_parallel.step_progress import StepProgress
from engine.tensor_parallel.step_wire import StepReceiver
from kvtransfer.data_plane import DataPlane
from kvtransfer.ranks.messages import Outgoing
from mesh.config import WorkerConfig
from mesh.errors import PdmeshError
from mesh.messages import TransferMessage
from mesh.parent_watch import die_with_parent
from mesh.service import setup_logging
from mesh.threads import configure_threads
from worker.followers.message_pipe import MessagePipe
from worker.followers.rank_setup import RankReady, RankSetup
from worker.kv import open_rank
from worker.poller import Poller
from worker.start import build_rank

_logger = logging.getLogger(__name__)


class Side(Protocol):
    """The rank's half of the hand-off. All methods run in the event loop."""

    def on_message(self, message: Any) -> None:
        """A message of rank 0."""
        ...

    def poll(self) -> bool:
        """Progress the transfers; whether any is open."""
        ...

    def fileno(self) -> int | None:
        """Turns readable when ``poll`` has something to do."""
        ...


@dataclass(slots=True, frozen=True)
class FollowerRank:
    """What a side is made of."""

    config: WorkerConfig
    epoch: int
    """Of the worker."""
    engine: Engine
    progress: StepProgress
    data_plane: DataPlane
    tell: Callable[[msgspec.Struct], object]
    """Queues a message to rank 0."""

    def send(self, peer_id: str, message: TransferMessage) -> bool:
        """Queue a message to a peer, by way of rank 0."""
        return bool(self.tell(Outgoing(peer_id=peer_id, message=message)))


MakeSide = Callable[[FollowerRank], Side]
"""Once the model is loaded."""


def run_follower(
    arguments: Sequence[str], commands: Any, make_side: MakeSide, niceness: int
) -> None:
    """Serve until rank 0 is gone.

    Args:
        arguments: Parent's process id, and the file descriptors of pipe and step socket.
        commands: Type of rank 0's messages besides ``RankSetup``.
        make_side: Makes the hand-off's half, once the model is loaded.
        niceness: Of the computing thread.
    """
    parent_pid, pipe_fd, step_fd = map(int, arguments)
    die_with_parent(parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 says when it is over
    configure_threads()  # the variables of it are inherited: torch is loaded already
    pipe, steps = socket.socket(fileno=pipe_fd), socket.socket(fileno=step_fd)
    asyncio.run(_Follower(steps, make_side, niceness).run(pipe, commands))


class _Follower:
    def __init__(self, steps: socket.socket, make_side: MakeSide, niceness: int) -> None:
        self._steps = steps
        self._make_side = make_side
        self._niceness = niceness
        self._progress = StepProgress()
        self._early: list[Any] = []
        self._side: Side | None = None
        self._poller = Poller(self._poll)
        self._over: asyncio.Future[None] | None = None

    async def run(self, pipe: socket.socket, commands: Any) -> None:
        loop = asyncio.get_running_loop()
        over = self._over = loop.create_future()

        def on_closed(reason: str) -> None:
            if not over.done():
                over.set_result(None)

        decoder = msgspec.msgpack.Decoder(RankSetup | commands)
        self._pipe: MessagePipe[Any] = MessagePipe(pipe, decoder, self._on_message, on_closed)

        def poll_soon() -> None:
            loop.call_soon_threadsafe(self._poller.poll_soon)

        self._progress.on_change = poll_soon
        polling = asyncio.create_task(self._poller.run())
        await asyncio.wait((over, polling), return_when=asyncio.FIRST_COMPLETED)
        if polling.done():
            polling.result()
        os._exit(0)  # the model thread may be in the middle of a step that nobody wants

    def _on_message(self, message: Any) -> None:
        if isinstance(message, RankSetup):
            config = message.config
            setup_logging(config.log_level, f"{config.worker_id}/{message.rank}", config.log_format)
            loop = asyncio.get_running_loop()
            model = threading.Thread(
                target=self._run_model, args=(message, loop), name="model", daemon=True
            )
            model.start()
        elif self._side is None:
            self._early.append(message)
        else:
            self._side.on_message(message)
            self._poller.poll_soon()

    def _on_loaded(self, setup: RankSetup, engine: Engine) -> None:
        data_plane = open_rank(setup.config, engine, setup.epoch)
        self._side = self._make_side(
            FollowerRank(
                setup.config, setup.epoch, engine, self._progress, data_plane, self._pipe.send
            )
        )
        fileno = self._side.fileno()
        if fileno is not None:
            asyncio.get_running_loop().add_reader(fileno, self._poller.poll_soon)
        for message in self._early:
            self._side.on_message(message)
        self._early.clear()
        self._pipe.send(RankReady(fingerprint=engine.fingerprint))

    def _poll(self) -> bool:
        return self._side is not None and self._side.poll()

    def _run_model(self, setup: RankSetup, loop: asyncio.AbstractEventLoop) -> None:
        """The model thread. Whatever goes wrong ends the process: rank 0 notices that."""
        try:
            self._compute(setup, loop)
        except EOFError:
            return  # the pipe is closed too
        except PdmeshError as error:
            _logger.error("%s", error)
        except BaseException:
            _logger.exception("rank %d failed", setup.rank)
        os._exit(1)

    def _compute(self, setup: RankSetup, loop: asyncio.AbstractEventLoop) -> None:
        thread_id = threading.get_native_id()
        own = os.getpriority(os.PRIO_PROCESS, thread_id)
        os.setpriority(os.PRIO_PROCESS, thread_id, own + self._niceness)
        engine = build_rank(setup)
        loop.call_soon_threadsafe(self._on_loaded, setup, engine)
        # On a device the host runs ahead: only the end of a step says what is in memory.
        by_group = engine.device.type == "cpu" and setup.config.kv_layer_groups > 1
        follow_steps(engine, StepReceiver(self._steps), self._progress, by_group=by_group)
