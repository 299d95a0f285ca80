"""What a receiver or a sender does not accept ends at once, with a stable code, on both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from kvtransfer.memory.segments import SegmentSize
from kvtransfer.transports.base import Connection, Write
from mesh import codec
from mesh.messages import ChunkHeader, Grant, LeaseRenew
from tests.conformance.cluster import Cluster, Node, committed, failures, released, sent

Tamper = Callable[[ChunkHeader], bytes]


class TamperingConnection(Connection):
    """Changes each header on its way out."""

    def __init__(self, inner: Connection, tamper: Tamper) -> None:
        self.inner = inner
        self.tamper = tamper

    def write(
        self, local_ids: Sequence[int], remote_ids: Sequence[int], header: bytes, size: SegmentSize
    ) -> Write:
        decoded = codec.decode(header)
        assert isinstance(decoded, ChunkHeader)
        return self.inner.write(local_ids, remote_ids, self.tamper(decoded), size)

    def close(self) -> None:
        self.inner.close()


def tamper_with(node: Node, tamper: Tamper, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = node.transport.connect
    monkeypatch.setattr(
        node.transport,
        "connect",
        lambda peer, address: TamperingConnection(connect(peer, address), tamper),
    )


def changed(**fields: Any) -> Tamper:
    return lambda header: codec.encode(msgspec.structs.replace(header, **fields))


def start(p: Node, d: Node, *, remote: Sequence[int] = (1, 2)) -> None:
    p.sender.expect("t", "d", 60)
    d.receiver.open("t", p.ref, list(remote), 0)
    p.sender.submit("t", 0, [10, 11])
    p.sender.finish("t", first_token_id=1, finished=False)


@pytest.mark.parametrize(
    ("tamper", "code"),
    [
        (changed(checksum=1), "checksum_mismatch"),
        (changed(epoch=77), "stale_epoch"),
        (changed(sender_epoch=77), "stale_epoch"),
        (changed(first_index=1), "outside_grant"),
        (changed(first_index=-1), "outside_grant"),
        (changed(num_blocks=0), "outside_grant"),
        (changed(num_blocks=3), "outside_grant"),
        (changed(num_bytes=1), "bad_length"),
        (changed(seq=-1), "duplicate_chunk"),
        (changed(rank=1), "bad_rank"),
        (lambda header: b"\xc1 not a message", "protocol_error"),
        (lambda header: codec.encode(LeaseRenew(transfer_ids=())), "protocol_error"),
        (lambda header: codec.encode(header)[:-3], "protocol_error"),
        (changed(transfer_id="x" * 3000), "cancelled"),
    ],
)
def test_bad_header(
    cluster: Cluster,
    p: Node,
    d: Node,
    tamper: Tamper,
    code: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tamper_with(p, tamper, monkeypatch)
    start(p, d)
    if code == "cancelled":  # an unknown transfer: D answers with a cancel of that id, t starves
        cluster.run_until(lambda: d.receiver.num_refused_chunks == 1)
        cluster.settle()
        cluster.advance(3)
        code = "incomplete"
    cluster.run_until(lambda: "t" in released(d) and bool(failures(p)))
    assert failures(d) == {"t": code}
    assert committed(d) == set()
    assert d.receiver.num_refused_chunks == 1
    assert d.receiver.num_open == p.sender.num_open == 0


def test_overlapping_chunks(
    cluster: Cluster, p: Node, d: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    tamper_with(p, changed(first_index=0), monkeypatch)
    p.sender.expect("t", "d", 60)
    d.receiver.open("t", p.ref, [1, 2], 0)
    p.sender.submit("t", 0, [10])
    cluster.run_until(lambda: d.bytes_of(1) == p.bytes_of(10))
    p.sender.submit("t", 1, [11])
    cluster.run_until(lambda: "t" in released(d))
    assert failures(d) == {"t": "duplicate_chunk"}


def test_corrupted_bytes(cluster: Cluster, p: Node, d: Node) -> None:
    """The bytes change between the sender's checksum and the receiver's."""
    p.sender.expect("t", "d", 60)
    d.receiver.open("t", p.ref, [1, 2], 0)
    p.sender.submit("t", 0, [10])
    cluster.run_until(lambda: d.bytes_of(1) == p.bytes_of(10))
    p.sender.submit("t", 1, [11])
    p.memory.block(11)[17] ^= 1
    cluster.run_until(lambda: "t" in released(d) and bool(failures(p)))
    assert failures(d) == {"t": "checksum_mismatch"}


def edit_grants(cluster: Cluster, **fields: Any) -> None:
    for index, (source, target, data) in enumerate(cluster.wire):
        message = codec.decode(data)
        if isinstance(message, Grant):
            edited = codec.encode(msgspec.structs.replace(message, **fields))
            cluster.wire[index] = (source, target, edited)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"fingerprint": "other"}, "fingerprint_mismatch"),
        ({"transport": "carrier-pigeon"}, "transport_mismatch"),
        ({"address": b""}, "bad_address"),
        ({"address": b"\x93\x01\x02\x03"}, "bad_address"),
        ({"address": b"x" * 70_000}, "bad_grant"),
        ({"block_ids": (1, 1)}, "bad_grant"),
        ({"block_ids": (1, 64)}, "bad_grant"),
        ({"block_ids": (-1, 2)}, "bad_grant"),
        ({"first_index": -1}, "bad_grant"),
        ({"block_ids": (1,)}, "grant_too_small"),
        ({"block_ids": (1, 2, 3)}, "incomplete"),
    ],
)
@pytest.mark.parametrize("is_expected", [True, False])
def test_bad_grant(
    cluster: Cluster, p: Node, d: Node, fields: dict[str, Any], code: str, is_expected: bool
) -> None:
    if is_expected:
        start(p, d)
        edit_grants(cluster, **fields)
    else:
        d.receiver.open("t", p.ref, [1, 2], 0)
        edit_grants(cluster, **fields)
        if code in ("grant_too_small", "incomplete"):
            cluster.step()
            p.sender.expect("t", "d", 60)
            p.sender.submit("t", 0, [10, 11])
            p.sender.finish("t", first_token_id=1, finished=False)
    cluster.run_until(lambda: "t" in released(d) and p.sender.num_open == 0)
    assert failures(d) == {"t": code}
    assert set(failures(p).values()) <= {code}


def test_grant_of_another_worker(cluster: Cluster, p: Node, d: Node) -> None:
    other = cluster.add_receiver("d2")
    p.sender.expect("t", "d", 60)
    other.receiver.open("t", p.ref, [1], 0)
    cluster.run_until(lambda: "t" in released(other))
    assert failures(other) == {"t": "wrong_receiver"}
    d.receiver.open("t", p.ref, [1], 0)
    p.sender.submit("t", 0, [10])
    p.sender.finish("t", first_token_id=1, finished=False)
    cluster.run_until(lambda: committed(d) == {"t"} and sent(p) == {"t"})


def test_repeated_grant_is_harmless_and_a_different_one_is_not(
    cluster: Cluster, p: Node, d: Node
) -> None:
    p.sender.expect("t", "d", 60)
    d.receiver.open("t", p.ref, [1, 2], 0)
    (grant,) = cluster.wire
    cluster.wire.append(grant)
    cluster.settle()
    assert failures(p) == failures(d) == {}
    cluster.wire.append(grant)
    edit_grants(cluster, block_ids=(5, 6))
    cluster.run_until(lambda: "t" in released(d) and bool(failures(p)))
    assert failures(p) == failures(d) == {"t": "duplicate_grant"}


def test_messages_of_strangers_change_nothing(cluster: Cluster, p: Node, d: Node) -> None:
    from mesh.messages import PrefillDone, TransferAck, TransferCancel, TransferNack

    p.sender.expect("t", "d", 60)
    d.receiver.open("t", p.ref, [1, 2], 0)
    cluster.settle()
    d.receiver.on_message("px", TransferNack(transfer_id="t", code="x", message="y"))
    done = PrefillDone(transfer_id="t", first_token_id=1, finished=True, num_chunks=0)
    d.receiver.on_message("px", done)
    d.receiver.on_message("p", TransferCancel(transfer_id="t"))
    p.sender.on_message("dx", TransferCancel(transfer_id="t"))
    p.sender.on_message("dx", TransferAck(transfer_id="t"))
    p.sender.on_message("d", TransferAck(transfer_id="t"))
    cluster.settle()
    assert d.events == p.events == []


def test_callers_mistakes_raise(cluster: Cluster, p: Node, d: Node) -> None:
    p.sender.expect("t", "d", 60)
    with pytest.raises(ValueError, match="already"):
        p.sender.expect("t", "d", 60)
    with pytest.raises(ValueError, match="outside"):
        p.sender.submit("t", 0, [64])
    p.sender.submit("t", 0, [1])
    with pytest.raises(ValueError, match="before"):
        p.sender.submit("t", 0, [2])
    p.sender.finish("t", first_token_id=1, finished=False)
    with pytest.raises(ValueError, match="already"):
        p.sender.finish("t", first_token_id=1, finished=False)
    with pytest.raises(ValueError, match="twice"):
        d.receiver.open("t", p.ref, [1, 1], 0)
    d.receiver.open("t", p.ref, [1], 0)
    with pytest.raises(ValueError, match="already"):
        d.receiver.open("t", p.ref, [2], 0)
