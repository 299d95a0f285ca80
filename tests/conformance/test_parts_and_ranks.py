"""Parts of layers, tensor-parallel slices and compression, over every transport."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvtransfer.events import Committed
from kvtransfer.memory.compression import GROUP
from kvtransfer.memory.layout import BlockLayout, sources_of_rank
from kvtransfer.ranks.names import member_id
from kvtransfer.ranks.receive_group import RankGroup
from mesh.kv_heads import Heads, heads_of_rank
from tests.conformance.cluster import NUM_BLOCKS, Cluster, Node, committed, failures, sent

NUM_ROWS, HEAD_BYTES = 6, 320
"""Three layers; a head of 16 slots of 10 float16."""


def layout(rank: int, tensor_parallel: int, num_heads: int, element: str = "") -> BlockLayout:
    heads = heads_of_rank(rank, tensor_parallel, num_heads)
    return BlockLayout(num_rows=NUM_ROWS, heads=heads, head_bytes=HEAD_BYTES, element=element)


def rows(node: Node, block: int, heads: int) -> npt.NDArray[np.uint8]:
    """One block as [rows, heads, head_bytes]."""
    block_bytes = np.frombuffer(node.memory.block(block), np.uint8)
    return block_bytes.reshape(NUM_ROWS, heads, HEAD_BYTES)


def test_parts_leave_one_by_one(cluster: Cluster) -> None:
    p = cluster.add_sender("p", layout=layout(0, 1, 4), num_parts=3)
    d = cluster.add_receiver("d", layout=layout(0, 1, 4))
    p.sender.expect("t", "d", 60)
    d.receiver.open("t", p.ref, [7, 3, 9], 0)
    for part in range(3):
        p.sender.submit("t", 0, [1, 2], part)
        arrived = slice(2 * part, 2 * part + 2)
        cluster.run_until(
            lambda arrived=arrived: (rows(d, 3, 4)[arrived] == rows(p, 2, 4)[arrived]).all()
        )
    p.sender.submit("t", 2, [5])  # all parts at once
    p.sender.finish("t", first_token_id=1, finished=False)
    cluster.run_until(lambda: committed(d) == {"t"} and sent(p) == {"t"})
    assert [p.bytes_of(b) for b in (1, 2, 5)] == [d.bytes_of(b) for b in (7, 3, 9)]
    assert all(d.is_poisoned(b) for b in set(range(NUM_BLOCKS)) - {7, 3, 9})


def test_a_missing_part_is_not_committed(cluster: Cluster) -> None:
    p = cluster.add_sender("p", layout=layout(0, 1, 4), num_parts=2)
    d = cluster.add_receiver("d", layout=layout(0, 1, 4))
    p.sender.expect("t", "d", 60)
    d.receiver.open("t", p.ref, [7, 3], 0)
    p.sender.submit("t", 0, [1, 2], 0)
    p.sender.submit("t", 0, [1], 1)
    p.sender.finish("t", first_token_id=1, finished=False)
    cluster.run_until(lambda: p.sender.num_open == d.receiver.num_open == 0)
    assert committed(d) == set()
    assert failures(p) == failures(d) == {"t": "incomplete"}


RANKS = [
    (from_ranks, to_ranks, num_heads)
    for num_heads in (1, 2, 6)
    for from_ranks in (1, 2, 3, 6)
    for to_ranks in (1, 2, 3, 6)
    if not any(num_heads % n and n % num_heads for n in (from_ranks, to_ranks))
]


@pytest.mark.parametrize(("from_ranks", "to_ranks", "num_heads"), RANKS)
def test_every_rank_gets_its_heads(
    cluster: Cluster, from_ranks: int, to_ranks: int, num_heads: int
) -> None:
    model = np.random.default_rng().integers(
        0, 256, (NUM_BLOCKS, NUM_ROWS, num_heads, HEAD_BYTES), np.uint8
    )
    senders, receivers = [], []
    for rank in range(from_ranks):
        own = layout(rank, from_ranks, num_heads)
        node = cluster.add_sender(f"p{rank}", layout=own, rank=rank, num_parts=3)
        held = model[:, :, own.heads.start : own.heads.stop]
        node.memory.array[:] = np.ascontiguousarray(held).reshape(-1)
        senders.append(node)
    for rank in range(to_ranks):
        own = layout(rank, to_ranks, num_heads)
        receivers.append(cluster.add_receiver(f"d{rank}", layout=own))
    local, remote = [4, 9, 2], [11, 0, 5]
    groups = []
    for rank, d in enumerate(receivers):
        sources = sources_of_rank(rank, to_ranks, from_ranks, num_heads)
        members = [member_id("t", source, rank) for source, _ in sources]
        groups.append(RankGroup("t", tuple(remote), members, d.receiver.cancel))
        for (source, heads), member in zip(sources, members, strict=True):
            p = senders[source]
            p.sender.expect(member, d.worker_id, 60)
            d.receiver.open(member, p.ref, remote, 0, rank=source, heads=heads)
            p.sender.submit(member, 0, local)
            p.sender.finish(member, first_token_id=9, finished=False)
    cluster.run_until(lambda: all(node.receiver.num_open == 0 for node in receivers))
    for rank, (d, group) in enumerate(zip(receivers, groups, strict=True)):
        (done,) = [out for event in d.events for out in group.on_event(event)]  # type: ignore[arg-type]
        assert isinstance(done, Committed)
        assert (done.transfer_id, done.done.first_token_id) == ("t", 9)
        heads = heads_of_rank(rank, to_ranks, num_heads)
        for ours, theirs in zip(local, remote, strict=True):
            expected = model[ours, :, heads.start : heads.stop]
            assert (rows(d, theirs, len(heads)) == expected).all()
        assert all(d.is_poisoned(b) for b in set(range(NUM_BLOCKS)) - set(remote))


@pytest.mark.parametrize("element", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_compressed(cluster: Cluster, element: str, num_parts: int) -> None:
    head_bytes = GROUP * 4 * 5
    own = BlockLayout(
        num_rows=NUM_ROWS, heads=Heads(start=0, stop=2), head_bytes=head_bytes, element=element
    )
    p = cluster.add_sender("p", layout=own, num_parts=num_parts, num_staging=4)
    d = cluster.add_receiver("d", layout=own, encoding="int8")
    num_values = p.memory.num_bytes // 4 * own_width(element)
    values = np.random.default_rng().standard_normal(num_values).astype(np.float32)
    p.memory.array[:] = as_element(values, element)
    p.sender.expect("t", "d", 60)
    d.receiver.open("t", p.ref, [7, 3, 9], 0)
    p.sender.submit("t", 0, [1, 2, 5])
    p.sender.finish("t", first_token_id=1, finished=False)
    cluster.run_until(lambda: committed(d) == {"t"} and sent(p) == {"t"})
    for ours, theirs in zip((1, 2, 5), (7, 3, 9), strict=True):
        before = to_float(p.bytes_of(ours), element).reshape(-1, GROUP)
        after = to_float(d.bytes_of(theirs), element).reshape(-1, GROUP)
        step = np.abs(before).max(axis=1, keepdims=True) / 127
        rounding = 2.0**-8 if element == "bfloat16" else 2.0**-11
        assert (np.abs(after - before) <= step * 0.51 + np.abs(before) * rounding).all()
        assert not (after == before).all()
    (done,) = [event for event in p.events if type(event).__name__ == "SendDone"]
    whole = 3 * own.block_bytes
    assert done.num_bytes == whole * (GROUP + 4) // (GROUP * (4 // own_width(element)))  # type: ignore[attr-defined]
    assert all(d.is_poisoned(b) for b in set(range(NUM_BLOCKS)) - {7, 3, 9})


def own_width(element: str) -> int:
    """Elements in four bytes."""
    return 1 if element == "float32" else 2


def as_element(values: npt.NDArray[np.float32], element: str) -> npt.NDArray[np.uint8]:
    if element == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(element).view(np.uint8)


def to_float(data: bytes, element: str) -> npt.NDArray[np.float32]:
    if element == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, element).astype(np.float32)
