"""Waiting times between attempts: exponential, capped, with jitter."""

from __future__ import annotations

import random


class Backoff:
    """Successive delays ``first_s``, 2x, 4x … up to ``cap_s``, each shortened at random."""

    def __init__(self, first_s: float, cap_s: float, *, jitter: float = 0.5) -> None:
        """Start over at ``first_s``.

        Args:
            first_s: first delay in seconds.
            cap_s: longest delay in seconds.
            jitter: largest fraction taken off a delay, so that peers do not return in step.
        """
        self._first_s = first_s
        self._cap_s = cap_s
        self._jitter = jitter
        self._next_s = first_s

    def next_delay_s(self) -> float:
        """The delay before the next attempt, in seconds."""
        delay_s = self._next_s
        self._next_s = min(self._cap_s, 2 * self._next_s)
        return delay_s * (1.0 - self._jitter * random.random())

    def reset(self) -> None:
        """The last attempt worked."""
        self._next_s = self._first_s
