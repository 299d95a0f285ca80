"""Progresses a rank's transfers beside whatever else its event loop does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

BUSY_POLL_S = 0.001
"""Poll interval while transfers are open: UCX makes progress only when polled."""
IDLE_POLL_S = 0.05


class Poller:
    """Calls ``poll`` until it is cancelled: soon where something happened, else by the clock."""

    def __init__(self, poll: Callable[[], bool]) -> None:
        """Take what progresses the transfers and returns whether any is open."""
        self._poll = poll
        self._poll_now = asyncio.Event()

    def poll_soon(self) -> None:
        """Poll in the next turn of the event loop; to be called in it."""
        self._poll_now.set()

    async def run(self) -> None:
        """Raises what ``poll`` raised."""
        while True:
            self._poll_now.clear()
            interval_s = BUSY_POLL_S if self._poll() else IDLE_POLL_S
            try:
                async with asyncio.timeout(interval_s):
                    await self._poll_now.wait()
            except TimeoutError:
                continue
