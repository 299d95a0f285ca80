"""A peer may write the pieces of granted blocks, each once."""

from __future__ import annotations

from kvtransfer.memory.segments import PieceSize
from kvtransfer.transports.write_grants import Permits

WHOLE, HALF = PieceSize(16, 16), PieceSize(8, 8)


def test_pieces_of_granted_blocks_once() -> None:
    permits = Permits(16)
    permits.permit([2, 5])
    assert not permits.take([1], WHOLE)
    assert not permits.take([2, 2], WHOLE)
    assert permits.take([2], WHOLE)
    assert not permits.take([2], WHOLE)
    assert permits.take([10], HALF)
    assert not permits.take([10, 11], HALF), "half of it was written before"
    assert permits.take([11], HALF)
    assert not permits.take([12], HALF)


def test_the_end_of_a_grant() -> None:
    permits = Permits(16)
    permits.permit([2])
    assert permits.take([2], WHOLE)
    permits.forbid([2, 9])
    assert not permits.take([2], WHOLE)
    permits.permit([2])
    assert permits.take([2], WHOLE)


def test_sizes_that_do_not_divide_blocks() -> None:
    permits = Permits(16)
    permits.permit([0, 1])
    for size in (PieceSize(12, 12), PieceSize(32, 32), PieceSize(16, 17), PieceSize(16, 0)):
        assert not permits.take([0], size)
