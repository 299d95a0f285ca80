"""How long a transfer moved bytes, and how much of that was hidden behind the prefill."""

from __future__ import annotations


class TransferTime:
    """Seconds in which at least one write of the transfer was on its way.

    compute   ████████████████████|finish
    writes        ███   ███    ███|██
                   └─ hidden ───┘ └exposed
    """

    __slots__ = ("_busy_since_s", "_finished_s", "_is_finished", "exposed_s", "hidden_s")

    def __init__(self) -> None:
        self.hidden_s = 0.0
        """While the prompt was still being computed."""
        self.exposed_s = 0.0
        """After it: what the request waits for."""
        self._busy_since_s: float | None = None
        self._is_finished = False
        self._finished_s = 0.0

    def resume(self, now_s: float) -> None:
        """A write starts."""
        if self._busy_since_s is None:
            self._busy_since_s = now_s

    def pause(self, now_s: float) -> None:
        """No write is on its way."""
        if self._busy_since_s is not None:
            self._count(now_s)
            self._busy_since_s = None

    def finish(self, now_s: float) -> None:
        """The prompt is computed."""
        if self._busy_since_s is not None:
            self._count(now_s)
            self._busy_since_s = now_s
        self._is_finished = True
        self._finished_s = now_s

    def exposed_until(self, now_s: float) -> float:
        """``exposed_s`` so far, with what is on its way now; call after ``finish``."""
        busy_s = 0.0 if self._busy_since_s is None else now_s - self._busy_since_s
        return self.exposed_s + busy_s

    def waited_until(self, now_s: float) -> float:
        """Time since ``finish`` in which nothing was on its way."""
        return max(0.0, now_s - self._finished_s - self.exposed_until(now_s))

    def _count(self, now_s: float) -> None:
        assert self._busy_since_s is not None
        seconds = now_s - self._busy_since_s
        if self._is_finished:
            self.exposed_s += seconds
        else:
            self.hidden_s += seconds
