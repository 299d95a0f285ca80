"""Which bytes of which pool a write moves, against plain slicing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.memory.layout import BlockLayout, part_of, plan_write, segment_ids, sources_of_rank
from kvtransfer.memory.segments import copy_segments, digest_blocks
from mesh.kv_heads import Heads, heads_of_rank

RANKS = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24])


def divides(ranks: int, num_heads: int) -> bool:
    return num_heads % ranks == 0 or ranks % num_heads == 0


@given(num_heads=st.sampled_from([1, 2, 3, 6, 8]), to_ranks=RANKS, from_ranks=RANKS)
def test_each_head_of_each_rank_has_one_source(
    num_heads: int, to_ranks: int, from_ranks: int
) -> None:
    if not (divides(to_ranks, num_heads) and divides(from_ranks, num_heads)):
        with pytest.raises(ValueError, match="divided"):
            sources_of_rank(0, to_ranks, from_ranks, num_heads)
        return
    used = set()
    for rank in range(to_ranks):
        wanted = heads_of_rank(rank, to_ranks, num_heads)
        got: list[int] = []
        for source, heads in sources_of_rank(rank, to_ranks, from_ranks, num_heads):
            assert heads_of_rank(source, from_ranks, num_heads).holds(heads)
            got += range(heads.start, heads.stop)
            used.add(source)
        assert got == list(range(wanted.start, wanted.stop))
    if to_ranks >= from_ranks:
        assert used == set(range(from_ranks)), "a rank that holds copies idles"


@given(
    sender=st.tuples(st.integers(0, 5), st.integers(1, 6)),
    receiver=st.tuples(st.integers(0, 5), st.integers(1, 6)),
    num_parts=st.sampled_from([1, 2, 3, 6]),
    seed=st.integers(0, 1 << 16),
)
def test_planned_segments_are_the_shared_heads(
    sender: tuple[int, int], receiver: tuple[int, int], num_parts: int, seed: int
) -> None:
    layouts = [
        BlockLayout(num_rows=6, heads=Heads(start=start, stop=start + count), head_bytes=5)
        for start, count in (sender, receiver)
    ]
    heads = layouts[0].heads.overlap(layouts[1].heads)
    plan = plan_write(*layouts, heads, num_parts)
    if not len(heads):
        assert plan is None
        return
    assert plan is not None
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 256, (4, 6, sender[1], 5), np.uint8)
    target = np.zeros((4, 6, receiver[1], 5), np.uint8)
    blocks, to_blocks = (2, 0), (1, 3)
    for part in rng.permutation(num_parts).tolist():
        local = segment_ids(blocks, part_of(plan.local, part, num_parts), plan.local_per_block)
        remote = segment_ids(
            to_blocks, part_of(plan.remote, part, num_parts), plan.remote_per_block
        )
        copy_segments(source.reshape(-1), local, target.reshape(-1), remote, plan.size)
        rows = slice(part * 6 // num_parts, (part + 1) * 6 // num_parts)
        expected = source[list(blocks)][:, rows, heads.start - sender[0] : heads.stop - sender[0]]
        at = slice(heads.start - receiver[0], heads.stop - receiver[0])
        assert (target[list(to_blocks)][:, rows, at] == expected).all()
        # The checksum does not depend on how finely a side cuts.
        count = len(local) // len(blocks)
        assert digest_blocks(source.reshape(-1), local, plan.size, count) == digest_blocks(
            target.reshape(-1), remote, plan.size, count
        )
    at = slice(heads.start - receiver[0], heads.stop - receiver[0])
    target[list(to_blocks), :, at] = 0
    assert not target.any(), "bytes outside the shared heads were written"


def test_pools_that_do_not_go_together() -> None:
    one = BlockLayout(num_rows=6, heads=Heads(start=0, stop=2), head_bytes=8)
    for other in (
        BlockLayout(num_rows=4, heads=Heads(start=0, stop=2), head_bytes=8),
        BlockLayout(num_rows=6, heads=Heads(start=0, stop=2), head_bytes=16),
    ):
        assert plan_write(one, other, Heads(start=0, stop=1), 1) is None
    assert plan_write(one, one, Heads(start=0, stop=2), 4) is None
    assert plan_write(one, one, Heads(start=0, stop=3), 1) is None
    assert one.segments(Heads(start=0, stop=1), 3) is None
    assert one.segments(Heads(start=0, stop=2), 0) is None
