"""The thread between hot loop and event loop: order, idleness, the end and the crash."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

import pytest

from worker.model_thread import ModelThread


class EchoLoop:
    """Returns each command as an event in the step after it, and notes who called."""

    def __init__(self, on_step: Callable[[], None] = lambda: None) -> None:
        self.handled: list[int] = []
        self.threads: set[int] = set()
        self.num_steps = 0
        self.rested = threading.Event()
        self.niceness = 0
        self._on_step = on_step

    def handle(self, command: int) -> None:
        self.threads.add(threading.get_ident())
        self.handled.append(command)

    def take_events(self) -> list[int]:
        return []

    def step(self) -> tuple[list[int], bool]:
        self.threads.add(threading.get_ident())
        self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        self.num_steps += 1
        self._on_step()
        events, self.handled = self.handled, []
        return events, False

    def rest(self) -> None:
        self.rested.set()


class PromptLoop(EchoLoop):
    """Returns each command as an event at once."""

    has_told = False

    def take_events(self) -> list[int]:
        events, self.handled = self.handled, []
        self.has_told |= bool(events)
        return events


class Running:
    """A started thread whose events and crash are collected in the event loop."""

    def __init__(self, loop: EchoLoop) -> None:
        self.events: asyncio.Queue[int] = asyncio.Queue()
        self.crashed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.callers: set[int] = set()
        self.thread: ModelThread[int, int] = ModelThread(
            loop, on_events=self._collect, on_crash=self.crashed.set_result, niceness=3
        )
        self.thread.start()

    def _collect(self, events: list[int]) -> None:
        self.callers.add(threading.get_ident())
        for event in events:
            self.events.put_nowait(event)


async def test_commands_and_events_keep_their_order_and_their_threads() -> None:
    loop = EchoLoop()
    running = Running(loop)
    for command in range(500):
        running.thread.post(command)
    found = [await asyncio.wait_for(running.events.get(), 60) for _ in range(500)]
    await running.thread.close()
    assert found == list(range(500))
    assert running.callers == {threading.get_ident()}
    assert len(loop.threads) == 1
    assert loop.threads != running.callers


async def test_what_commands_led_to_is_told_before_the_step_that_follows() -> None:
    may_end = threading.Event()

    def on_step() -> None:
        if loop.has_told:
            assert may_end.wait(60)

    loop = PromptLoop(on_step)
    running = Running(loop)
    running.thread.post(7)
    assert await asyncio.wait_for(running.events.get(), 30) == 7
    may_end.set()
    await running.thread.close()
    assert not running.crashed.done()


async def test_only_the_model_thread_is_nice() -> None:
    loop = EchoLoop()
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    running = Running(loop)
    running.thread.post(0)
    await asyncio.wait_for(running.events.get(), 60)
    await running.thread.close()
    assert loop.niceness == before + 3
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


async def test_an_idle_loop_rests() -> None:
    loop = EchoLoop()
    running = Running(loop)
    assert await asyncio.to_thread(loop.rested.wait, 60)
    await running.thread.close()


async def test_a_command_wakes_an_idle_loop() -> None:
    running = Running(EchoLoop())
    for command in range(3):
        running.thread.post(command)
        assert await asyncio.wait_for(running.events.get(), 60) == command
    await running.thread.close()


async def test_after_close_no_step_is_taken() -> None:
    loop = EchoLoop()
    running = Running(loop)
    running.thread.post(1)
    await asyncio.wait_for(running.events.get(), 60)
    await running.thread.close()
    num_steps = loop.num_steps
    running.thread.post(2)
    await running.thread.close()
    assert loop.num_steps == num_steps
    assert running.events.empty()
    assert not running.crashed.done()


async def test_a_crash_is_told_once_and_ends_the_thread() -> None:
    def fail() -> None:
        raise RuntimeError("out of order")

    loop = EchoLoop(fail)
    running = Running(loop)
    error = await asyncio.wait_for(running.crashed, 60)
    await running.thread.close()
    assert loop.num_steps == 1
    with pytest.raises(RuntimeError, match="out of order"):
        raise error
