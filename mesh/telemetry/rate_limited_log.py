"""A log line that a hostile or broken peer cannot turn into a flood."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class RateLimitedLog:
    """Writes at most one record per interval and says how many it left out."""

    def __init__(
        self,
        logger: logging.Logger,
        *,
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._next_s = float("-inf")
        self._num_suppressed = 0

    def warning(self, text: str, *args: object) -> None:
        """Log now, or count the record as suppressed."""
        now_s = self._clock()
        if now_s < self._next_s:
            self._num_suppressed += 1
            return
        if self._num_suppressed:
            text += f" suppressed={self._num_suppressed}"
        self._num_suppressed = 0
        self._next_s = now_s + self._interval_s
        self._logger.warning(text, *args)
