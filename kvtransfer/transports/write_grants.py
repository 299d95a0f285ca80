"""Which segments one peer may write: those of blocks under an open grant, each once."""

from __future__ import annotations

from collections.abc import Sequence

from kvtransfer.memory.segments import SegmentSize


class WriteGrants:
    """Kept by transports whose receiver sees every write before it lands."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._written: dict[int, set[tuple[int, int]]] = {}
        """Permitted block → (stride, segment id) of what has been written to it."""

    def grant_writes(self, block_ids: Sequence[int]) -> None:
        """Blocks of a new grant."""
        for block_id in block_ids:
            self._written[block_id] = set()

    def revoke_writes(self, block_ids: Sequence[int]) -> None:
        """Blocks of a grant that has ended."""
        for block_id in block_ids:
            self._written.pop(block_id, None)

    def take(self, ids: Sequence[int], size: SegmentSize) -> bool:
        """Use up the right to write these segments; False, and none used, where it is not given."""
        if not size.fits(self._block_bytes):
            return False
        segments = {(size.stride, segment) for segment in ids}
        blocks = {segment * size.stride // self._block_bytes for segment in ids}
        if len(segments) != len(ids) or not blocks <= self._written.keys():
            return False
        if any(not self._written[block].isdisjoint(segments) for block in blocks):
            return False
        for stride, segment in segments:
            self._written[segment * stride // self._block_bytes].add((stride, segment))
        return True
