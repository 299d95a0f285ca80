"""Cancels, leases, fences and restarts: every transfer ends, blocks come back once and quiet."""

from __future__ import annotations

import time

import pytest

from mesh.errors import ConfigError
from mesh.messages import LeaseRenew, PeerRef
from tests.conformance.cluster import (
    LEASE_S,
    NUM_BLOCKS,
    Cluster,
    Node,
    committed,
    failures,
    released,
    sent,
)


def start(p: Node, d: Node, transfer_id: str = "t", remote: tuple[int, ...] = (1, 2)) -> None:
    p.sender.expect(transfer_id, d.worker_id, 60)
    d.receiver.open(transfer_id, p.ref, list(remote), 0)


def finish(p: Node, transfer_id: str = "t", local: tuple[int, ...] = (10, 11)) -> None:
    p.sender.submit(transfer_id, 0, list(local))
    p.sender.finish(transfer_id, first_token_id=1, finished=False)


def test_receiver_cancels_midway(cluster: Cluster, p: Node, d: Node) -> None:
    start(p, d)
    p.sender.submit("t", 0, [10])
    cluster.run_until(lambda: d.bytes_of(1) == p.bytes_of(10))
    d.receiver.cancel("t")
    assert d.receiver.num_quarantined_blocks == 2
    cluster.run_until(lambda: "t" in released(d) and bool(failures(p)))
    assert failures(d) == {}
    assert failures(p) == {"t": "cancelled"}
    p.sender.submit("t", 1, [11])  # the engine has not heard of it yet
    cluster.settle()
    assert d.is_poisoned(2)
    assert d.receiver.num_quarantined_blocks == 0


def test_receiver_cancels_before_the_request_came(cluster: Cluster, p: Node, d: Node) -> None:
    d.receiver.open("t", p.ref, [1], 0)
    d.receiver.cancel("t")
    cluster.run_until(lambda: "t" in released(d))
    p.sender.expect("t", "d", 60)
    cluster.run_until(lambda: failures(p) == {"t": "cancelled"})


def test_sender_cancels_midway(cluster: Cluster, p: Node, d: Node) -> None:
    start(p, d)
    p.sender.submit("t", 0, [10])
    cluster.run_until(lambda: d.bytes_of(1) == p.bytes_of(10))
    p.sender.cancel("t", "aborted", "the client left")
    cluster.run_until(lambda: "t" in released(d) and bool(failures(p)))
    assert failures(d) == failures(p) == {"t": "aborted"}


def test_sender_cancels_before_the_grant(cluster: Cluster, p: Node, d: Node) -> None:
    p.sender.expect("t", "d", 60)
    p.sender.cancel("t", "aborted", "the client left")
    cluster.run_until(lambda: failures(p) == {"t": "aborted"})
    d.receiver.open("t", p.ref, [1], 0)
    cluster.run_until(lambda: "t" in released(d))
    assert failures(d) == {"t": "aborted"}


def test_both_cancel_while_the_grant_is_on_its_way(cluster: Cluster, p: Node, d: Node) -> None:
    start(p, d)
    d.receiver.cancel("t")
    p.sender.cancel("t", "aborted", "the client left")
    cluster.run_until(lambda: "t" in released(d) and bool(failures(p)))  # the clock stands still
    assert failures(d) == {}


def test_leases_hold_while_both_sides_live(cluster: Cluster, p: Node, d: Node) -> None:
    start(p, d)
    cluster.advance(5 * LEASE_S)
    assert failures(p) == failures(d) == {}
    renewals = {source for source, _, m in cluster.log if isinstance(m, LeaseRenew)}
    assert renewals == {"p", "d"}
    finish(p)
    cluster.run_until(lambda: committed(d) == {"t"} and sent(p) == {"t"})


def test_frozen_sender_is_fenced(cluster: Cluster, p: Node, d: Node) -> None:
    other = cluster.add_sender("p2")
    start(p, d, "t", (1, 2))
    start(p, d, "t2", (3, 4))
    start(other, d, "other", (5, 6))
    cluster.settle()
    p.is_frozen = True
    cluster.advance(LEASE_S + 1)
    assert failures(d) == {"t": "lease_expired", "t2": "lease_expired"}
    assert released(d) == {}
    assert d.receiver.num_quarantined_blocks == 4
    cluster.advance(LEASE_S + 1)
    assert set(released(d)) == {"t", "t2"}
    assert d.receiver.num_fences == 1
    # It wakes up, still believing in its grants.
    p.is_frozen = False
    finish(p, "t")
    finish(p, "t2")
    cluster.settle()
    assert all(d.is_poisoned(b) for b in range(NUM_BLOCKS))
    assert set(failures(p)) == {"t", "t2"}
    # Nobody else was hurt, and the same peer is welcome again.
    finish(other, "other")
    start(p, d, "t3", (7, 8))
    finish(p, "t3")
    cluster.run_until(lambda: committed(d) == {"other", "t3"} and sent(p) == {"t3"})
    assert d.bytes_of(8) == p.bytes_of(11)


def test_fence_with_a_connection_in_use(cluster: Cluster, p: Node, d: Node) -> None:
    """The sender wrote before; after the fence it must not reach the pool over its old way."""
    start(p, d)
    p.sender.submit("t", 0, [10])
    cluster.run_until(lambda: d.bytes_of(1) == p.bytes_of(10))
    d.receiver.on_peer_down("p")
    d.memory.block(2)[:] = d.memory.block(30)
    p.sender.submit("t", 1, [11])
    cluster.advance(0.5)
    cluster.run_until(lambda: "t" in released(d) and "t" in failures(p))
    cluster.settle()
    assert d.is_poisoned(2)
    assert failures(d) == {"t": "peer_down"}
    start(p, d, "again", (7, 8))
    finish(p, "again")
    cluster.run_until(lambda: committed(d) == {"again"} and sent(p) == {"again"})


def test_held_grant_of_a_fenced_endpoint(cluster: Cluster, p: Node, d: Node) -> None:
    """It must not replace the newer endpoint when its request comes at last."""
    d.receiver.open("old", p.ref, [1], 0)
    cluster.step()
    d.receiver.on_peer_down("p")
    start(p, d, "new", (3, 4))
    cluster.settle()
    p.sender.expect("old", "d", 60)
    finish(p, "new")
    cluster.run_until(lambda: committed(d) == {"new"} and sent(p) == {"new"})
    assert failures(p) == {"old": "superseded"}


def test_frozen_receiver(cluster: Cluster, p: Node, d: Node) -> None:
    start(p, d)
    cluster.settle()
    d.is_frozen = True
    finish(p)
    cluster.step()
    cluster.advance(3 * LEASE_S)
    assert p.sender.num_open == 0
    assert sent(p) == {"t"} or set(failures(p)) == {"t"}
    d.is_frozen = False
    cluster.advance(3 * LEASE_S)
    assert d.receiver.num_open == 0
    assert committed(d) == {"t"} or set(released(d)) == {"t"}


def test_sender_keeps_blocks_until_ack_or_lease(cluster: Cluster, p: Node, d: Node) -> None:
    start(p, d)
    finish(p)
    cluster.run_until(lambda: committed(d) == {"t"})
    cluster.wire.clear()  # the ack is lost
    cluster.advance(LEASE_S - 1)
    assert sent(p) == set()
    cluster.advance(2)
    assert sent(p) == {"t"}


def test_lost_final_words_are_said_again(cluster: Cluster, p: Node, d: Node) -> None:
    start(p, d, "done", (1, 2))
    start(p, d, "aborted", (3, 4))
    finish(p, "done")
    p.sender.cancel("aborted", "aborted", "the client left")
    num_turns = 0
    while d.bytes_of(2) != p.bytes_of(11) or num_turns < 50:
        cluster.step()
        time.sleep(0.001)
        num_turns += 1
        for message in [m for m in cluster.wire if m[1] == "d"]:
            cluster.wire.remove(message)
    assert committed(d) == set()
    cluster.advance(LEASE_S / 2)
    assert committed(d) == sent(p) == {"done"}
    assert failures(d) == {"aborted": "aborted"}


def test_lost_grant(cluster: Cluster, p: Node, d: Node) -> None:
    d.receiver.open("t", p.ref, [1, 2], 0)
    cluster.wire.clear()
    cluster.advance(LEASE_S / 2)
    assert failures(d) == {"t": "unknown"}
    assert released(d) == {"t": (1, 2)}


def test_no_grant(cluster: Cluster, p: Node) -> None:
    p.sender.expect("waits", "d", 3)
    p.sender.expect("computed", "d", 600)
    finish(p, "computed")
    cluster.advance(4)
    assert failures(p) == {"waits": "no_grant"}
    cluster.advance(LEASE_S)
    assert failures(p) == {"waits": "no_grant", "computed": "no_grant"}


def test_grant_that_can_not_be_delivered(cluster: Cluster, d: Node) -> None:
    nowhere = PeerRef(worker_id="p", epoch=1, endpoint="tcp://nowhere:1")
    d.receiver.open("t", nowhere, [1, 2], 0)
    cluster.advance(LEASE_S + 1)
    assert failures(d) == {"t": "peer_unreachable"}
    assert released(d) == {"t": (1, 2)}


def test_grant_is_delivered_once_the_link_is_up(cluster: Cluster, d: Node) -> None:
    nowhere = PeerRef(worker_id="p", epoch=1, endpoint="tcp://nowhere:1")
    d.receiver.open("t", nowhere, [1, 2], 0)
    cluster.advance(2)
    p = cluster.add_sender("p")
    p.sender.expect("t", "d", 60)
    finish(p)
    cluster.advance(0.5)
    cluster.run_until(lambda: committed(d) == {"t"} and sent(p) == {"t"})


def test_link_down_on_the_sender(cluster: Cluster, p: Node, d: Node) -> None:
    start(p, d)
    p.sender.submit("t", 0, [10])
    cluster.run_until(lambda: d.bytes_of(1) == p.bytes_of(10))
    p.sender.on_peer_down("d")
    cluster.run_until(lambda: failures(p) == {"t": "peer_down"})
    d.receiver.on_peer_down("p")
    cluster.advance(1)
    assert released(d) == {"t": (1, 2)}


def test_sender_restarts_under_its_name(cluster: Cluster, p: Node, d: Node) -> None:
    start(p, d)
    cluster.settle()
    cluster.remove(p)
    again = cluster.add_sender("p", epoch=2)
    start(again, d, "t2", (3, 4))
    finish(again, "t2")
    cluster.run_until(lambda: committed(d) == {"t2"} and sent(again) == {"t2"})
    cluster.advance(1)
    assert failures(d) == {"t": "peer_restarted"}
    assert released(d) == {"t": (1, 2)}
    d.receiver.open("late", p.ref, [9], 0)
    cluster.step()
    assert failures(d)["late"] == "stale_epoch"
    assert released(d)["late"] == (9,)


def test_receiver_restarts_under_its_name(cluster: Cluster, p: Node, d: Node) -> None:
    start(p, d)
    p.sender.submit("t", 0, [10])
    cluster.run_until(lambda: d.bytes_of(1) == p.bytes_of(10))
    cluster.remove(d)
    again = cluster.add_receiver("d", epoch=2)
    start(p, again, "t2", (3, 4))
    finish(p, "t2")
    cluster.run_until(lambda: committed(again) == {"t2"} and sent(p) == {"t2"})
    assert set(failures(p)) == {"t"}
    assert again.bytes_of(4) == p.bytes_of(11)
    assert again.is_poisoned(2)


def test_unknown_transport_name() -> None:
    with pytest.raises(ConfigError, match="transport"):
        Cluster("pigeon").add_sender("p")


def test_a_short_break_of_the_link_spares_what_is_not_granted(
    cluster: Cluster, p: Node, d: Node
) -> None:
    p.sender.expect("t", "d", 60)
    p.sender.submit("t", 0, [10, 11])
    p.sender.on_peer_down("d")
    p.sender.finish("t", first_token_id=1, finished=False)
    d.receiver.on_peer_down("p")
    d.receiver.open("t", p.ref, [1, 2], 0)
    cluster.run_until(lambda: committed(d) == {"t"} and sent(p) == {"t"})
    assert [p.bytes_of(b) for b in (10, 11)] == [d.bytes_of(b) for b in (1, 2)]
