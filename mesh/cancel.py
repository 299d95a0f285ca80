"""Ends a task for certain."""

from __future__ import annotations

import asyncio
from typing import Any

_RETRY_S = 0.1


async def cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Cancel ``task`` until it has ended, whatever it ended with.

    One ``cancel()`` is not enough where a library turns the cancellation into an error of its own,
    which the task handles and goes on: a Redis client does so while it connects.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_RETRY_S)
    if not task.cancelled():
        task.exception()  # mark it retrieved
