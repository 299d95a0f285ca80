"""A peer may write the segments of granted blocks, each once."""

from __future__ import annotations

from kvtransfer.memory.segments import SegmentSize
from kvtransfer.transports.write_grants import WriteGrants

WHOLE, HALF = SegmentSize(16, 16), SegmentSize(8, 8)


def test_segments_of_granted_blocks_once() -> None:
    write_grants = WriteGrants(16)
    write_grants.grant_writes([2, 5])
    assert not write_grants.take([1], WHOLE)
    assert not write_grants.take([2, 2], WHOLE)
    assert write_grants.take([2], WHOLE)
    assert not write_grants.take([2], WHOLE)
    assert write_grants.take([10], HALF)
    assert not write_grants.take([10, 11], HALF), "half of it was written before"
    assert write_grants.take([11], HALF)
    assert not write_grants.take([12], HALF)


def test_the_end_of_a_grant() -> None:
    write_grants = WriteGrants(16)
    write_grants.grant_writes([2])
    assert write_grants.take([2], WHOLE)
    write_grants.revoke_writes([2, 9])
    assert not write_grants.take([2], WHOLE)
    write_grants.grant_writes([2])
    assert write_grants.take([2], WHOLE)


def test_sizes_that_do_not_divide_blocks() -> None:
    write_grants = WriteGrants(16)
    write_grants.grant_writes([0, 1])
    for size in (SegmentSize(12, 12), SegmentSize(32, 32), SegmentSize(16, 17), SegmentSize(16, 0)):
        assert not write_grants.take([0], size)
