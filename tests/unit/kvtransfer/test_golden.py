"""The wire form of every transfer message, fixed, and read back by an independent decoder."""

from __future__ import annotations

import msgpack
import pytest
import xxhash

from kvtransfer.memory.pool import BlockMemory
from kvtransfer.memory.segments import SegmentSize
from kvtransfer.transports.address import pack_address, unpack_address
from kvtransfer.transports.socket.frame import (
    FRAME_VERSION,
    GREETING,
    MAGIC,
    RECEIPT,
    pack_frame_head,
)
from mesh import codec
from mesh.errors import ProtocolError, VersionMismatch
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
            heads=(2, 4),
            pool_heads=(0, 4),
            encoding="int8",
        ),
        [
            *("grant", "t-1", "f0", 1 << 60, "ucx", b"\x00\xff", 2, [5, 300, 70000], 10.0),
            *([2, 4], [0, 4], "int8"),
        ],
        "93029ca56772616e74a3742d31a26630cf1000000000000000a3756378c40200ff029305cd012cce00011170"
        "cb4024000000000000920204920004a4696e7438cff5c74bd0171ca0b6",
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
            stride=6144,
            part=1,
            num_parts=2,
            encoding="",
        ),
        ["chunk", "t-1", 7, 8, 0, 3, 16, 2, 1474560, (1 << 64) - 1, 6144, 1, 2, ""],
        "93029ea56368756e6ba3742d31070800031002ce00168000cfffffffffffffffffcd18000102a0"
        "cffa7286159af09af2",
    ),
    (
        PrefillDone(
            transfer_id="t-1",
            first_token_id=42,
            finished=False,
            num_chunks=4,
            sender_epoch=8,
            wait_s=0.25,
            hidden_s=0.5,
            exposed_s=0.125,
            num_bytes=1474560,
        ),
        ["prefill-done", "t-1", 42, False, 4, 8, True, 0.25, 0.5, 0.125, 1474560],
        "93029bac70726566696c6c2d646f6e65a3742d312ac20408c3cb3fd0000000000000cb3fe0000000000000cb"
        "3fc0000000000000ce00168000cfb1b32b3e4e78c713",
    ),
    (TransferAck(transfer_id="t-1"), ["ack", "t-1"], "930292a361636ba3742d31cfeb62343a8e032267"),
    (
        TransferCancel(transfer_id="t-1"),
        ["cancel", "t-1"],
        "930292a663616e63656ca3742d31cff12953fe3b1183d7",
    ),
    (
        TransferNack(transfer_id="t-1", code="unknown", message="no", sender_epoch=8),
        ["nack", "t-1", "unknown", "no", 8],
        "930295a46e61636ba3742d31a7756e6b6e6f776ea26e6f08cf9c270b5205ff7c50",
    ),
    (
        LeaseRenew(transfer_ids=("t-1", "t-2")),
        ["lease", ["t-1", "t-2"]],
        "930292a56c6561736592a3742d31a3742d32cfa05e9c2634d7e9ad",
    ),
]


@pytest.mark.parametrize(("message", "fields", "golden"), GOLDEN, ids=lambda v: type(v).__name__)
def test_golden_bytes(message: AnyMessage, fields: list[object], golden: str) -> None:
    assert codec.encode(message).hex() == golden
    version, read_back, checksum = msgpack.unpackb(bytes.fromhex(golden))
    assert (version, read_back) == (2, fields)
    assert checksum == xxhash.xxh3_64_intdigest(msgpack.packb(fields))
    assert codec.decode(bytes.fromhex(golden)) == message


def test_golden_address() -> None:
    memory = BlockMemory(bytearray(64), num_blocks=4, block_bytes=16)
    data = pack_address("tcp", memory, 0, b"\x01")
    assert data.hex() == "9801a37463700004" + "10c300c40101"
    assert msgpack.unpackb(data) == [1, "tcp", 0, 4, 16, True, 0, b"\x01"]
    assert unpack_address(data, transport="tcp").endpoint == b"\x01"


def test_golden_frame() -> None:
    assert GREETING.pack(MAGIC, FRAME_VERSION, b"t" * 16).hex() == "50444b5602000000" + "74" * 16
    ids = "01000000" + "02010000"
    head = "04000000" + "02000000" + "0018000000000000" + "000c000000000000" + "68656164" + ids
    size = SegmentSize(6144, 3072)
    assert pack_frame_head(b"head", size, [1, 258]).hex() == head
    assert pack_frame_head(b"head", size, [1, 258], [7, 8]).hex() == head + "0700000008000000"
    assert RECEIPT.pack(3).hex() == "0300000000000000"


VERSION_1 = (
    "920199a56772616e74a3742d31a26630cf1000000000000000a3756378c40200ff029305cd012cce00011170"
    "cb4024000000000000",
    "92019aa56368756e6ba3742d31070800031002ce00168000cfffffffffffffffff",
    "920192a361636ba3742d31",
)


@pytest.mark.parametrize("data", VERSION_1)
def test_a_peer_of_version_1_is_refused_by_its_version(data: str) -> None:
    with pytest.raises(VersionMismatch, match="peer speaks version 1"):
        codec.decode(bytes.fromhex(data))


@pytest.mark.parametrize("golden", [golden for _, _, golden in GOLDEN])
def test_no_changed_bit_and_no_cut_is_accepted(golden: str) -> None:
    whole = bytes.fromhex(golden)
    for bit in range(len(whole) * 8):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            codec.decode(bytes(changed))
    for length in range(len(whole)):
        with pytest.raises(ProtocolError):
            codec.decode(whole[:length])


def test_a_prefill_done_without_times_is_read() -> None:
    """As processes of the same version sent it before the times were appended."""
    old = bytes.fromhex("930297ac70726566696c6c2d646f6e65a3742d312ac20408c3cf00ac0353c9ef624d")
    assert codec.decode(old) == PrefillDone(
        transfer_id="t-1", first_token_id=42, finished=False, num_chunks=4, sender_epoch=8
    )
