"""How late the event loop is on this machine just now: what bounds on time are scaled by."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_SLEEP_S = 0.001


class LoopLag:
    """Of the loop that it runs in."""

    worst_s = 0.0
    """Longest that a task which was ready has waited."""

    async def watch(self) -> None:
        """Measure until cancelled."""
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(_SLEEP_S)
            self.worst_s = max(self.worst_s, time.monotonic() - before_s - _SLEEP_S)


@asynccontextmanager
async def watched_loop() -> AsyncIterator[LoopLag]:
    """Measure until the block ends."""
    lag = LoopLag()
    watching = asyncio.create_task(lag.watch())
    try:
        yield lag
    finally:
        watching.cancel()
