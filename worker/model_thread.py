"""The thread that runs a worker's hot loop, apart from the event loop that does all I/O."""

from __future__ import annotations

import asyncio
import collections
import os
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

Command = TypeVar("Command")
Event = TypeVar("Event")
CommandIn = TypeVar("CommandIn", contravariant=True)

_IDLE_WAIT_S = 0.05
"""Longest sleep with nothing to do; bounds how late a deadline is noticed."""


class Loop(Protocol[CommandIn, Event]):
    """A role's hot loop. Its methods run on the model thread only."""

    def handle(self, command: CommandIn) -> None:
        """Apply one command from the control loop."""
        ...

    def take_events(self) -> list[Event]:
        """What commands have led to; the control loop need not wait for a step to hear of it."""
        ...

    def step(self) -> tuple[list[Event], bool]:
        """Schedule, run, and return (events for the control loop, whether anything was done)."""
        ...

    def rest(self) -> None:
        """There is nothing to do until a command comes or some time passes."""
        ...


class ModelThread(Generic[Command, Event]):
    """Drains the inbox into ``loop.handle``, calls ``loop.step``, hands the events of both back.

    A command waits for the end of the step that runs, which the engine keeps short.

    ``post`` may be called from any thread. ``on_events`` runs in the event loop that called
    ``start``; ``on_crash`` too, once, if the loop raised: the worker must then end, since nothing
    is known about its state. ``niceness`` is that of the thread and of all it
    computes with, above the process's: what passes tokens on comes before what computes them.
    """

    def __init__(
        self,
        loop: Loop[Command, Event],
        *,
        on_events: Callable[[list[Event]], None],
        on_crash: Callable[[BaseException], None],
        niceness: int,
    ) -> None:
        self._loop = loop
        self._on_events = on_events
        self._on_crash = on_crash
        self._niceness = niceness
        self._inbox: collections.deque[Command] = collections.deque()
        self._wake = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._event_loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start stepping."""
        self._event_loop = asyncio.get_running_loop()
        self._thread.start()

    def post(self, command: Command) -> None:
        """Queue a command; its effect shows in later events."""
        self._inbox.append(command)
        self._wake.set()

    def emit(self, events: list[Event]) -> None:
        """Hand events over during a step; called on the model thread."""
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(self._on_events, events)

    def wake(self) -> None:
        """Something outside the inbox has changed: look again. From any thread."""
        self._wake.set()

    async def close(self) -> None:
        """Stop after the current step and wait for it."""
        self._stop = True
        self._wake.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        assert self._event_loop is not None
        thread_id = threading.get_native_id()
        os.setpriority(
            os.PRIO_PROCESS, thread_id, os.getpriority(os.PRIO_PROCESS, thread_id) + self._niceness
        )
        try:
            while not self._stop:
                self._wake.clear()
                while self._inbox:
                    self._loop.handle(self._inbox.popleft())
                if events := self._loop.take_events():
                    self.emit(events)
                events, worked = self._loop.step()
                if events:
                    self.emit(events)
                if not worked and not self._inbox:
                    self._loop.rest()
                    self._wake.wait(_IDLE_WAIT_S)
        except BaseException as error:
            if not self._stop:
                self._event_loop.call_soon_threadsafe(self._on_crash, error)
