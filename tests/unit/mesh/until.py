"""Waits for something another process or thread brings about."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Return as soon as ``condition()`` is true; TimeoutError when it does not become so."""
    async with asyncio.timeout(timeout_s):
        # The condition is another process's doing: there is no event to wait for.
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
