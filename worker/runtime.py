"""Runs what surrounds a worker's hot loop: its host, its model thread, and the transfer poller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic

from mesh.errors import PdmeshError
from mesh.worker_info import LoadSnapshot
from worker.drain import drain
from worker.host import WorkerHost
from worker.model_thread import Command, Event, Loop, ModelThread
from worker.poller import Poller

_logger = logging.getLogger(__name__)


class WorkerRuntime(Generic[Command, Event]):
    """Owns the model thread; borrows the host. Lives in one event loop."""

    def __init__(
        self,
        loop: Loop[Command, Event],
        host: WorkerHost,
        *,
        on_events: Callable[[list[Event]], None],
        poll: Callable[[], bool],
        poll_fileno: int | None,
        niceness: int,
        load: Callable[[], LoadSnapshot],
        drain_s: float,
    ) -> None:
        """Prepare; nothing runs before ``run``.

        Args:
            loop: the role's hot loop.
            host: started and closed by ``run``.
            on_events: what the hot loop emitted.
            poll: progresses the transfers; returns whether any is open.
            poll_fileno: turns readable when ``poll`` has something to do; None: by the clock alone.
            niceness: of the model thread.
            load: the current load, with ``draining`` from here.
            drain_s: longest that running work may take to end after ``stop``.
        """
        self._host = host
        self._poller = Poller(poll)
        self.poll_soon = self._poller.poll_soon
        """Progress the transfers in the next turn of the event loop."""
        self._poll_fileno = poll_fileno
        self._crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_events = on_events
        self._thread: ModelThread[Command, Event] = ModelThread(
            loop, on_events=self._deliver, on_crash=self._on_crash, niceness=niceness
        )
        self.post = self._thread.post
        """Queue a command for the hot loop; from any thread."""
        self.emit = self._thread.emit
        """Deliver events in the middle of a step; from the hot loop."""
        self.wake = self._thread.wake
        """Look for work again; from any thread."""
        self._load = load
        self._drain_s = drain_s
        self.draining = False
        """Routers are to send nothing new."""

    def fail(self, error: PdmeshError) -> None:
        """End ``run`` with this error; in the event loop."""
        if not self._crashed.done():
            self._crashed.set_exception(error)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``, then until what runs has ended; cancelled, stop at once.

        Raises what the model thread raised.
        """
        self._thread.start()
        poller = asyncio.create_task(self._poller.run())
        if self._poll_fileno is not None:
            asyncio.get_running_loop().add_reader(self._poll_fileno, self.poll_soon)
        ending = asyncio.create_task(self._drain_after(stop))
        try:
            await self._host.start()
            await asyncio.wait((ending, self._crashed, poller), return_when=asyncio.FIRST_COMPLETED)
            for ended in (self._crashed, poller):
                if ended.done():
                    ended.result()
        finally:
            self.draining = True
            ending.cancel()
            await self._host.close()
            await self._thread.close()
            poller.cancel()
            if self._poll_fileno is not None:
                asyncio.get_running_loop().remove_reader(self._poll_fileno)

    async def _drain_after(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.draining = True
        if self._drain_s > 0:
            await drain(self._load, self._drain_s)

    def _deliver(self, events: list[Event]) -> None:
        self._on_events(events)
        self.poll_soon()

    def _on_crash(self, error: BaseException) -> None:
        if self._crashed.done():
            return  # of what is known already
        _logger.error("model thread crashed", exc_info=error)
        self.fail(PdmeshError(f"model thread crashed: {error!r}"))
