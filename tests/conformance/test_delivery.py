"""What arrives, over every transport: exactly the granted blocks, whatever the order of events."""

from __future__ import annotations

import random

from kvtransfer.events import Committed
from mesh.messages import TransferNack
from tests.conformance.cluster import NUM_BLOCKS, Cluster, Node, committed, failures, released, sent


def deliver(
    cluster: Cluster, p: Node, d: Node, transfer_id: str, local: list[int], remote: list[int]
) -> None:
    p.sender.expect(transfer_id, d.worker_id, 60)
    d.receiver.open(transfer_id, p.ref, remote, 0)
    p.sender.submit(transfer_id, 0, local)
    p.sender.finish(transfer_id, first_token_id=7, finished=False)
    cluster.run_until(lambda: transfer_id in committed(d) and transfer_id in sent(p))
    for ours, theirs in zip(local, remote, strict=True):
        assert p.bytes_of(ours) == d.bytes_of(theirs)


def test_scattered_blocks_arrive_exactly(cluster: Cluster, p: Node, d: Node) -> None:
    local = random.sample(range(NUM_BLOCKS), 40)
    remote = random.sample(range(NUM_BLOCKS), 40)
    deliver(cluster, p, d, "t", local, remote)
    assert all(d.is_poisoned(b) for b in set(range(NUM_BLOCKS)) - set(remote))
    done = next(e.done for e in d.events if isinstance(e, Committed))
    assert (done.first_token_id, done.finished) == (7, False)
    assert p.sender.num_open == d.receiver.num_open == d.receiver.num_quarantined_blocks == 0


def test_chunks_leave_while_prefill_goes_on(cluster: Cluster, p: Node, d: Node) -> None:
    p.sender.expect("t", "d", 60)
    d.receiver.open("t", p.ref, list(range(8)), 0)
    for start in range(0, 8, 2):
        p.sender.submit("t", start, [20 + start, 21 + start])
        last = start + 1
        cluster.run_until(lambda last=last: d.bytes_of(last) == p.bytes_of(20 + last))
    assert committed(d) == set()
    p.sender.finish("t", first_token_id=1, finished=False)
    cluster.run_until(lambda: committed(d) == {"t"} and sent(p) == {"t"})


def test_many_transfers_at_once(cluster: Cluster, p: Node, d: Node) -> None:
    remote = random.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    shares = {f"t{i}": remote[i * 4 : i * 4 + 4] for i in range(16)}
    local = {name: random.sample(range(NUM_BLOCKS), 4) for name in shares}
    for name, blocks in shares.items():
        p.sender.expect(name, "d", 60)
        d.receiver.open(name, p.ref, blocks, 0)
        p.sender.submit(name, 0, local[name])
        p.sender.finish(name, first_token_id=1, finished=False)
    cluster.run_until(lambda: committed(d) == sent(p) == set(shares))
    for name, blocks in shares.items():
        assert [p.bytes_of(b) for b in local[name]] == [d.bytes_of(b) for b in blocks]


def test_grant_before_expect(cluster: Cluster, p: Node, d: Node) -> None:
    d.receiver.open("t", p.ref, [3, 1], 0)
    cluster.settle()
    assert p.sender.num_open == 1
    p.sender.expect("t", "d", 60)
    p.sender.submit("t", 0, [5, 6])
    p.sender.finish("t", first_token_id=1, finished=False)
    cluster.run_until(lambda: committed(d) == {"t"} and sent(p) == {"t"})
    assert d.bytes_of(3) == p.bytes_of(5)


def test_everything_computed_before_the_grant(cluster: Cluster, p: Node, d: Node) -> None:
    p.sender.expect("t", "d", 60)
    p.sender.submit("t", 0, [5, 6])
    p.sender.finish("t", first_token_id=1, finished=False)
    cluster.settle()
    d.receiver.open("t", p.ref, [3, 1], 0)
    cluster.run_until(lambda: committed(d) == {"t"} and sent(p) == {"t"})
    assert d.bytes_of(1) == p.bytes_of(6)


def test_blocks_below_first_index_are_skipped(cluster: Cluster, p: Node, d: Node) -> None:
    p.sender.expect("t", "d", 60)
    p.sender.submit("t", 0, [10, 11])
    d.receiver.open("t", p.ref, [40, 41], 3)
    cluster.settle()
    p.sender.submit("t", 2, [12, 13, 14])
    p.sender.finish("t", first_token_id=1, finished=False)
    cluster.run_until(lambda: committed(d) == {"t"} and sent(p) == {"t"})
    assert [d.bytes_of(b) for b in (40, 41)] == [p.bytes_of(b) for b in (13, 14)]
    assert all(d.is_poisoned(b) for b in range(NUM_BLOCKS) if b not in (40, 41))


def test_nothing_to_transfer(cluster: Cluster, p: Node, d: Node) -> None:
    """D's prefix cache had every full block."""
    p.sender.expect("t", "d", 60)
    d.receiver.open("t", p.ref, [], 2)
    p.sender.submit("t", 0, [10, 11])
    p.sender.finish("t", first_token_id=1, finished=False)
    cluster.run_until(lambda: committed(d) == {"t"} and sent(p) == {"t"})


def test_finished_at_the_first_token_before_the_grant(cluster: Cluster, p: Node, d: Node) -> None:
    p.sender.expect("t", "d", 60)
    p.sender.submit("t", 0, [10, 11])
    p.sender.finish("t", first_token_id=2, finished=True)
    cluster.run_until(lambda: sent(p) == {"t"})
    d.receiver.open("t", p.ref, [1, 2], 0)
    cluster.run_until(lambda: committed(d) == {"t"})
    assert d.is_poisoned(1)
    assert d.is_poisoned(2)


def test_finished_at_the_first_token_after_chunks(cluster: Cluster, p: Node, d: Node) -> None:
    p.sender.expect("t", "d", 60)
    d.receiver.open("t", p.ref, [1, 2, 3], 0)
    p.sender.submit("t", 0, [10, 11])
    cluster.run_until(lambda: d.bytes_of(2) == p.bytes_of(11))
    p.sender.finish("t", first_token_id=2, finished=True)
    cluster.run_until(lambda: committed(d) == {"t"} and sent(p) == {"t"})
    assert next(e.done.finished for e in d.events if isinstance(e, Committed))
    assert d.is_poisoned(3)


def test_two_receivers_on_one_sender(cluster: Cluster, p: Node, d: Node) -> None:
    other = cluster.add_receiver("d2", epoch=5)
    for node, name in ((d, "a"), (other, "b")):
        p.sender.expect(name, node.worker_id, 60)
        node.receiver.open(name, p.ref, [1, 2], 0)
        p.sender.submit(name, 0, [10, 11] if name == "a" else [20, 21])
        p.sender.finish(name, first_token_id=1, finished=False)
    cluster.run_until(lambda: sent(p) == {"a", "b"} and committed(d) | committed(other) == sent(p))
    assert d.bytes_of(1) == p.bytes_of(10)
    assert other.bytes_of(1) == p.bytes_of(20)


def test_two_senders_to_one_receiver(cluster: Cluster, p: Node, d: Node) -> None:
    other = cluster.add_sender("p2", epoch=9)
    for node, name, remote in ((p, "a", [1, 2]), (other, "b", [3, 4])):
        node.sender.expect(name, "d", 60)
        d.receiver.open(name, node.ref, remote, 0)
        node.sender.submit(name, 0, [10, 11])
        node.sender.finish(name, first_token_id=1, finished=False)
    cluster.run_until(lambda: committed(d) == {"a", "b"} and sent(p) | sent(other) == committed(d))
    assert d.bytes_of(2) == p.bytes_of(11)
    assert d.bytes_of(4) == other.bytes_of(11)


def test_transfers_follow_each_other_over_the_same_blocks(
    cluster: Cluster, p: Node, d: Node
) -> None:
    for turn in range(5):
        deliver(cluster, p, d, f"t{turn}", random.sample(range(NUM_BLOCKS), 3), [7, 8, 9])


def test_unknown_grant_is_refused_not_kept_waiting(cluster: Cluster, p: Node, d: Node) -> None:
    d.receiver.open("t", p.ref, [1, 2], 0)
    cluster.step()
    cluster.advance(6)
    assert failures(d) == {"t": "unknown"}
    assert released(d) == {"t": (1, 2)}
    nacks = [m for _, _, m in cluster.log if isinstance(m, TransferNack)]
    assert [n.code for n in nacks] == ["unknown"]
    assert p.sender.num_open == 0
