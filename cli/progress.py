"""What ``pdmesh up`` tells while it starts: a spinner on a terminal, plain lines elsewhere.

Everything goes to stderr: stdout is left for the one line that scripts wait for.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.status import Status


class Progress:
    """A context: lines may be shown at any time, the pending work only inside it."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._status: Status | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            # Late: only a terminal needs it.
            from rich.console import Console

            self._status = Console(stderr=True, highlight=False).status("starting")
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def show(self, line: str) -> None:
        """Print one line."""
        if self._status is not None:
            self._status.console.print(line, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def step(self, line: str) -> None:
        """Print a line of what ``pending`` tells on a terminal."""
        if self._status is None:
            self.show(line)

    def pending(self, text: str) -> None:
        """Say beside the spinner what is still awaited."""
        if self._status is not None:
            self._status.update(f"{text} ({self.elapsed_s:.0f} s)")
