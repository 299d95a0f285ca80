"""Which pieces one peer may write: those of blocks under an open grant, each once."""

from __future__ import annotations

from collections.abc import Sequence

from kvtransfer.memory.segments import PieceSize


class Permits:
    """Kept by transports whose receiver sees every write before it lands."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._written: dict[int, set[tuple[int, int]]] = {}
        """Permitted block → (stride, piece id) of what has been written to it."""

    def permit(self, block_ids: Sequence[int]) -> None:
        """Blocks of a new grant."""
        for block_id in block_ids:
            self._written[block_id] = set()

    def forbid(self, block_ids: Sequence[int]) -> None:
        """Blocks of a grant that has ended."""
        for block_id in block_ids:
            self._written.pop(block_id, None)

    def take(self, ids: Sequence[int], size: PieceSize) -> bool:
        """Use up the right to write these pieces; False, and nothing used, where there is none."""
        if not size.fits(self._block_bytes):
            return False
        pieces = {(size.stride, piece) for piece in ids}
        blocks = {piece * size.stride // self._block_bytes for piece in ids}
        if len(pieces) != len(ids) or not blocks <= self._written.keys():
            return False
        if any(not self._written[block].isdisjoint(pieces) for block in blocks):
            return False
        for stride, piece in pieces:
            self._written[piece * stride // self._block_bytes].add((stride, piece))
        return True
