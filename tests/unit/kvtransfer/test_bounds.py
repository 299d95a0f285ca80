"""Every list that a peer can make longer has an end."""

from __future__ import annotations

from kvtransfer.lease import MAX_LEASE_S, MIN_LEASE_S, Lease, RenewalTimer
from kvtransfer.outbox import Outbox
from kvtransfer.sender.closed_transfers import ClosedTransfers
from kvtransfer.sender.held_grants import HeldGrants
from mesh.messages import Grant, TransferAck, TransferMessage, TransferNack


def grant(name: str) -> Grant:
    return Grant(
        transfer_id=name,
        fingerprint="f",
        epoch=1,
        transport="inproc",
        address=b"",
        first_index=0,
        block_ids=(),
        lease_s=1,
    )


def test_held_grants() -> None:
    held = HeldGrants(hold_s=5, capacity=2)
    assert held.add("d", grant("a"), 0)
    assert not held.add("d", grant("a"), 0)
    assert held.add("d2", grant("b"), 1)
    assert not held.add("d", grant("c"), 1)
    assert held.take_expired(4.9) == []
    assert held.take_expired(5) == [("d", grant("a"))]
    held.drop_receiver("d2")
    assert len(held) == 0
    assert held.take("b") is None


def test_tombstones() -> None:
    stones = ClosedTransfers(capacity=2)
    words = [TransferNack(transfer_id=f"t{i}", code="c", message="") for i in range(3)]
    for word in words:
        stones.add(word.transfer_id, word)
    assert [stones.get(f"t{i}") for i in range(3)] == [None, words[1], words[2]]


def test_outbox_keeps_order_and_gives_up() -> None:
    now_s, is_up = 0.0, False
    sent: list[TransferMessage] = []

    def send(peer_id: str, message: TransferMessage) -> bool:
        if is_up:
            sent.append(message)
        return is_up

    outbox = Outbox(send, lambda: now_s, ttl_s=10)
    acks = [TransferAck(transfer_id=f"t{i}") for i in range(4)]
    outbox.post("p", acks[0])
    now_s = 6
    outbox.post("p", acks[1])
    is_up = True
    outbox.post("p", acks[2])
    assert sent == []  # not before the older ones
    now_s = 11
    outbox.poll()
    assert sent == acks[1:3]
    outbox.post("p", acks[3])
    assert sent == acks[1:]


def test_outbox_forgets_a_dead_peer() -> None:
    sent: list[str] = []
    outbox = Outbox(lambda peer, message: sent.append(peer) is not None, lambda: 0, ttl_s=10)
    outbox.post("p", TransferAck(transfer_id="t"))
    outbox.drop("p")
    sent.clear()
    outbox.poll()
    assert sent == []


def test_lease_durations_of_a_peer_are_clamped() -> None:
    assert Lease.start(1e9, 0).deadline_s == MAX_LEASE_S
    assert Lease.start(-5, 0).deadline_s == MIN_LEASE_S
    lease = Lease.start(10, 0)
    lease.renew(4)
    assert not lease.is_expired(13.9)
    assert lease.is_expired(14)


def test_renewals_are_spaced() -> None:
    timer = RenewalTimer(9)
    assert [timer.is_due(now_s) for now_s in (0, 1, 2.9, 3, 4, 6)] == [
        True,
        False,
        False,
        True,
        False,
        True,
    ]
