"""Threads for work on text that would hold up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

MAX_INLINE_CHARS = 4096
"""Longer text is tokenised in a thread; this much takes a few milliseconds."""

_NUM_THREADS = 2

_Result = TypeVar("_Result")


class TextThreads:
    """Owns the threads; ``close`` stops them."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")

    def close(self) -> None:
        """Stop after what runs."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Run ``work`` off the event loop, after what waits already."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def run_if_long(self, num_chars: int, work: Callable[[], _Result]) -> _Result:
        """Run ``work`` on ``num_chars`` of text, off the event loop when that takes long."""
        return work() if num_chars <= MAX_INLINE_CHARS else await self.run(work)
