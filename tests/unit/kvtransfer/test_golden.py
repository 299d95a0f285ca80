"""The wire form of every transfer message, fixed, and read back by an independent decoder."""

from __future__ import annotations

import msgpack
import pytest

from kvtransfer.address import pack_address, unpack_address
from kvtransfer.pool import BlockMemory
from kvtransfer.tcp_frame import GREETING, MAGIC, RECEIPT, TCP_VERSION, pack_frame_head
from mesh import codec
from mesh.messages import (
    AnyMessage,
    ChunkHeader,
    Grant,
    LeaseRenew,
    PrefillDone,
    TransferAck,
    TransferCancel,
    TransferNack,
)

GOLDEN: list[tuple[AnyMessage, list[object], str]] = [
    (
        Grant(
            transfer_id="t-1",
            fingerprint="f0",
            epoch=1 << 60,
            transport="ucx",
            address=b"\x00\xff",
            first_index=2,
            block_ids=(5, 300, 70000),
            lease_s=10.0,
        ),
        ["grant", "t-1", "f0", 1 << 60, "ucx", b"\x00\xff", 2, [5, 300, 70000], 10.0],
        "920199a56772616e74a3742d31a26630cf1000000000000000a3756378c40200ff029305cd012cce00011170"
        "cb4024000000000000",
    ),
    (
        ChunkHeader(
            transfer_id="t-1",
            epoch=7,
            sender_epoch=8,
            rank=0,
            seq=3,
            first_index=16,
            num_blocks=2,
            num_bytes=1474560,
            checksum=(1 << 64) - 1,
        ),
        ["chunk", "t-1", 7, 8, 0, 3, 16, 2, 1474560, (1 << 64) - 1],
        "92019aa56368756e6ba3742d31070800031002ce00168000cfffffffffffffffff",
    ),
    (
        PrefillDone(transfer_id="t-1", first_token_id=42, finished=False, num_chunks=4),
        ["prefill-done", "t-1", 42, False, 4],
        "920195ac70726566696c6c2d646f6e65a3742d312ac204",
    ),
    (TransferAck(transfer_id="t-1"), ["ack", "t-1"], "920192a361636ba3742d31"),
    (TransferCancel(transfer_id="t-1"), ["cancel", "t-1"], "920192a663616e63656ca3742d31"),
    (
        TransferNack(transfer_id="t-1", code="unknown", message="no"),
        ["nack", "t-1", "unknown", "no"],
        "920194a46e61636ba3742d31a7756e6b6e6f776ea26e6f",
    ),
    (
        LeaseRenew(transfer_ids=("t-1", "t-2")),
        ["lease", ["t-1", "t-2"]],
        "920192a56c6561736592a3742d31a3742d32",
    ),
]


@pytest.mark.parametrize(("message", "fields", "golden"), GOLDEN, ids=lambda v: type(v).__name__)
def test_golden_bytes(message: AnyMessage, fields: list[object], golden: str) -> None:
    assert codec.encode(message).hex() == golden
    assert msgpack.unpackb(bytes.fromhex(golden)) == [1, fields]
    assert codec.decode(bytes.fromhex(golden)) == message


def test_golden_address() -> None:
    memory = BlockMemory(bytearray(64), num_blocks=4, block_bytes=16)
    data = pack_address("tcp", memory, 0, b"\x01")
    assert data.hex() == "9801a37463700004" + "10c300c40101"
    assert msgpack.unpackb(data) == [1, "tcp", 0, 4, 16, True, 0, b"\x01"]
    assert unpack_address(data, transport="tcp", block_bytes=16).endpoint == b"\x01"


def test_golden_tcp_frame() -> None:
    assert GREETING.pack(MAGIC, TCP_VERSION, b"t" * 16).hex() == "50444b5601000000" + "74" * 16
    assert pack_frame_head(b"head", [1, 258]).hex() == (
        "04000000" + "02000000" + "68656164" + "01000000" + "02010000"
    )
    assert RECEIPT.pack(3).hex() == "0300000000000000"
