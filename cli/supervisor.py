"""Keeps the children of ``pdmesh up`` alive: starts, watches, restarts, stops in order.

A child lives like this:

    starting ──> running ── ended ──> waiting ── backoff over ──> running …
        any ── stop() ──> stopped
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cli.child_process import ChildProcess
from cli.log_echo import LogEcho
from mesh.backoff import Backoff

_BACKOFF_FIRST_S = 0.5
_BACKOFF_CAP_S = 30.0
_STABLE_S = 60.0
"""A child that ran this long starts over at the first backoff."""


@dataclass(slots=True)
class _Watched:
    child: ChildProcess
    echo: LogEcho
    started_s: float
    backoff: Backoff = field(
        default_factory=lambda: Backoff(_BACKOFF_FIRST_S, _BACKOFF_CAP_S, jitter=0.2)
    )
    restart_at_s: float | None = None
    num_restarts: int = 0


class Supervisor:
    """Owns the children from ``start()`` to ``stop()``; all methods run in the main thread.

    Blocking only in ``stop()``; ``poll()`` is called a few times a second.
    """

    def __init__(
        self,
        show: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an empty supervisor.

        Args:
            show: prints one line for people.
            clock: seconds, for the backoff.
        """
        self._show = show
        self._clock = clock
        self._watched: list[_Watched] = []

    @property
    def children(self) -> list[ChildProcess]:
        """In the order they were added."""
        return [watched.child for watched in self._watched]

    def adopt(self, child: ChildProcess) -> None:
        """Watch a child that runs already."""
        echo = LogEcho(child.log_path, child.spec.name, self._show)
        self._watched.append(_Watched(child, echo, self._clock()))

    def start(self, child: ChildProcess) -> None:
        """Start a child and watch it.

        Raises:
            OSError: its program cannot be run.
        """
        self.adopt(child)
        child.start()

    def first_ended(self) -> ChildProcess | None:
        """A child that does not run, if any: while starting, that is a failure."""
        return next((child for child in self.children if not child.running), None)

    def echo_errors(self) -> None:
        """Show new errors from the children's logs."""
        for watched in self._watched:
            watched.echo.poll()

    def poll(self) -> None:
        """Restart what ended, once its backoff is over."""
        now_s = self._clock()
        for watched in self._watched:
            if watched.child.running:
                continue
            if watched.restart_at_s is None:
                self._plan_restart(watched, now_s)
            elif now_s >= watched.restart_at_s:
                watched.restart_at_s = None
                watched.started_s = now_s
                watched.num_restarts += 1
                self._show(f"{watched.child.spec.name}: restarting ({watched.num_restarts})")
                try:
                    watched.child.start()
                except OSError as error:
                    self._show(f"{watched.child.spec.name}: cannot start: {error}")

    def stop(self, groups: Sequence[Sequence[ChildProcess]], timeout_s: float) -> None:
        """Stop one group of children after another, then kill whatever of them is left.

        Args:
            groups: each is asked to stop when the one before has ended.
            timeout_s: for each group to end by itself.
        """
        try:
            for group in groups:
                for child in group:
                    child.terminate()
                deadline_s = time.monotonic() + timeout_s
                for child in group:
                    if not child.wait(max(0.0, deadline_s - time.monotonic())):
                        self._show(f"{child.spec.name}: did not stop in {timeout_s:g} s, killed")
                        child.kill()
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill every child at once."""
        for child in self.children:
            child.kill()

    def _plan_restart(self, watched: _Watched, now_s: float) -> None:
        child = watched.child
        if now_s - watched.started_s > _STABLE_S:
            watched.backoff.reset()
        delay_s = watched.backoff.next_delay_s()
        watched.restart_at_s = now_s + delay_s
        self._show(f"{child.spec.name}: {child.exit_text}, restart in {delay_s:.1f} s")
        for line in child.last_log_lines(3):
            self._show(f"[{child.spec.name}] {line}")
