"""Hand-offs between workers of different numbers of ranks, as their rank 0 makes them."""

from __future__ import annotations

import msgspec
import pytest

from kvtransfer.events import BlocksReleased, Committed, ReceiveFailed, SendDone, SendFailed
from mesh import codec
from mesh.messages import Grant, LeaseRenew, TransferNack
from tests.conformance.cluster import Cluster
from tests.conformance.ranked_pair import RankedPair

LOCAL, REMOTE = [4, 9, 2], [11, 0, 5]


def begin(pair: RankedPair, name: str = "t") -> None:
    pair.p.expect(name, pair.d_ref, 60)
    pair.d.open(name, pair.p_ref, REMOTE, 0)


def compute(pair: RankedPair, name: str = "t", *, step: int = 0) -> None:
    for part in range(2):
        pair.p.submit(name, 0, LOCAL, part, step=step)
    pair.p.finish(name, first_token_id=9, finished=False)


def check_blocks(pair: RankedPair) -> None:
    for rank in range(len(pair.d_nodes)):
        for ours, theirs in zip(LOCAL, REMOTE, strict=True):
            assert (pair.received(rank, theirs) == pair.expected(rank, ours)).all()


@pytest.mark.parametrize(
    ("senders", "receivers", "num_heads"),
    [(1, 1, 4), (2, 1, 4), (1, 2, 4), (2, 2, 4), (2, 3, 6), (4, 1, 2), (4, 2, 2), (1, 4, 2)],
)
def test_every_rank_gets_its_heads(
    cluster: Cluster, senders: int, receivers: int, num_heads: int
) -> None:
    pair = RankedPair(cluster, senders, receivers, num_heads)
    begin(pair)
    compute(pair)
    pair.run_until_over()
    (done,) = pair.d_events
    assert isinstance(done, Committed)
    assert (done.transfer_id, done.done.first_token_id) == ("t", 9)
    (over,) = pair.p_events
    assert isinstance(over, SendDone)
    moved = sum(pair.received(r, b).size for r in range(receivers) for b in REMOTE)
    assert over.num_bytes == done.done.num_bytes == moved
    check_blocks(pair)


def test_what_is_finished_at_the_first_token_is_not_sent(cluster: Cluster) -> None:
    pair = RankedPair(cluster, 2, 2, 4)
    begin(pair)
    pair.p.submit("t", 0, LOCAL, step=1)  # P's follower never gets so far
    pair.p.finish("t", first_token_id=9, finished=True)
    pair.run_until(lambda: pair.d.num_open == 1)
    pair.computed = 1
    pair.run_until_over()
    (done,) = pair.d_events
    assert isinstance(done, Committed)
    assert done.done.finished


def test_a_rank_writes_only_what_it_has_computed(cluster: Cluster) -> None:
    pair = RankedPair(cluster, 2, 1, 4)
    begin(pair)
    compute(pair, step=7)
    pair.computed = 6
    rank_0_heads, follower_heads = slice(0, 2), slice(2, 4)
    pair.run_until(
        lambda: (pair.received(0, 11)[:, rank_0_heads] == pair.expected(0, 4)[:, :2]).all()
    )
    for _ in range(20):
        pair.step()
    assert not pair.received(0, 11)[:, follower_heads].any()
    assert pair.d_events == []
    pair.computed = 7
    pair.run_until_over()
    check_blocks(pair)


def test_the_receiver_gives_up(cluster: Cluster) -> None:
    pair = RankedPair(cluster, 2, 2, 4)
    begin(pair)
    for _ in range(3):
        pair.step()
    pair.d.cancel("t")
    compute(pair)
    pair.run_until_over()
    assert pair.d_events == [BlocksReleased("t", tuple(REMOTE))]
    (over,) = pair.p_events
    assert isinstance(over, SendFailed)
    assert over.code == "cancelled"


def test_one_rank_of_the_sender_fails(cluster: Cluster) -> None:
    pair = RankedPair(cluster, 2, 2, 4)
    begin(pair)
    for _ in range(3):
        pair.step()
    pair.p_senders[1].cancel("t/1-1", "disk_on_fire", "as it happens")
    compute(pair)
    pair.run_until_over()
    failed, gone = pair.d_events
    assert isinstance(failed, ReceiveFailed)
    assert failed.code == "disk_on_fire"
    assert gone == BlocksReleased("t", tuple(REMOTE))
    assert [type(event) for event in pair.p_events] == [SendFailed]


def test_the_link_breaks(cluster: Cluster) -> None:
    pair = RankedPair(cluster, 2, 2, 4)
    begin(pair)
    for _ in range(6):
        pair.step()
    pair.d.on_peer_down("p")
    pair.p.on_peer_down("d")
    pair.to_p.clear()
    pair.to_d.clear()
    pair.run_until(lambda: bool(pair.p_events))
    for _ in range(10):
        pair.step()
        cluster.clock.now_s += 0.05
    pair.run_until_over()
    assert [type(event) for event in pair.d_events] == [ReceiveFailed, BlocksReleased]
    assert [type(event) for event in pair.p_events] == [SendFailed]


def test_many_leases_are_renewed_by_every_rank(cluster: Cluster) -> None:
    pair = RankedPair(cluster, 2, 1, 4)
    for number in range(3):
        pair.p.expect(f"t{number}", pair.d_ref, 600)
        pair.d.open(f"t{number}", pair.p_ref, REMOTE[number : number + 1], 0)
    for _ in range(100):  # 50 s: five leases
        cluster.clock.now_s += 0.5
        for _ in range(4):
            pair.step()
    renewals = [message for message in pair.to_d_log if isinstance(message, LeaseRenew)]
    assert {name for message in renewals for name in message.transfer_ids} == {
        f"t{number}/{rank}-0" for number in range(3) for rank in range(2)
    }
    assert pair.d_events == pair.p_events == []


def test_a_grant_for_a_rank_that_is_not_there_is_refused(cluster: Cluster) -> None:
    pair = RankedPair(cluster, 2, 1, 4)
    begin(pair)
    pair.run_until(lambda: len(pair.to_p) == 2)
    grant = next(m for m in map(_decoded, pair.to_p) if isinstance(m, Grant))
    pair.p.on_message("d", msgspec.structs.replace(grant, transfer_id="t/9-0"))
    cluster.clock.now_s += 6.0  # it may have come before its request
    pair.run_until(lambda: any(isinstance(m, TransferNack) for m in pair.to_d_log))
    assert [m.transfer_id for m in pair.to_d_log if isinstance(m, TransferNack)] == ["t/9-0"]


def test_ranks_that_could_not_share_heads_are_an_error_on_both_sides(cluster: Cluster) -> None:
    pair = RankedPair(cluster, 2, 1, 4)
    three = msgspec.structs.replace(pair.p_ref, tensor_parallel=3)
    pair.d.open("t", three, REMOTE, 0)
    pair.p.expect("t", three, 60)
    pair.step()
    assert [type(event) for event in pair.d_events] == [ReceiveFailed, BlocksReleased]
    assert [type(event) for event in pair.p_events] == [SendFailed]


def _decoded(data: bytes) -> object:
    return codec.decode(data)
