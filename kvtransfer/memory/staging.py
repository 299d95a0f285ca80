"""Blocks at the end of the sender's pool that hold compressed KV while it is on its way."""

from __future__ import annotations


class StagingBlocks:
    """Hands out block ids ``first`` to ``first + count`` (exclusive), which no sequence owns."""

    def __init__(self, first: int = 0, count: int = 0) -> None:
        self._free = list(range(first, first + count))

    def take(self, count: int) -> tuple[int, ...]:
        """So many blocks, or none where fewer are free."""
        if count > len(self._free):
            return ()
        taken, self._free = self._free[:count], self._free[count:]
        return tuple(taken)

    def give_back(self, block_ids: tuple[int, ...]) -> None:
        """Blocks that nothing reads any more."""
        self._free.extend(block_ids)
