"""Chunk headers: what a sender says about one write, and what the receiver makes of it.

granted:   first_index … first_index + len(block_ids)
                |----+----+----+----+----+----|
chunk:                    |----+----|           header.first_index, num_blocks
"""

from __future__ import annotations

from kvtransfer.checksum import checksum_blocks
from kvtransfer.pool import BlockMemory
from kvtransfer.receiver_state import Incoming
from kvtransfer.transport import MAX_CHUNK_BLOCKS, MAX_HEADER_BYTES
from mesh import codec
from mesh.errors import ProtocolError
from mesh.messages import ChunkHeader

MAX_CHUNKS = 1 << 20


def decode_header(data: bytes) -> ChunkHeader:
    """Decode what travelled with a write.

    Raises:
        ProtocolError: too large, malformed, or not a chunk header.
    """
    if len(data) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a chunk header of {len(data)} bytes is over the cap")
    message = codec.decode(data)
    if not isinstance(message, ChunkHeader):
        raise ProtocolError(f"a write came with a {type(message).__name__} instead of a header")
    return message


def chunk_fault(
    header: ChunkHeader, incoming: Incoming, memory: BlockMemory, epoch: int
) -> str | None:
    """The stable code of what is wrong with an arrived chunk, or None if its blocks are good.

    Reads the blocks (checksum), so it is called once per chunk; changes nothing.
    """
    if header.epoch != epoch or header.sender_epoch != incoming.sender.epoch:
        return "stale_epoch"
    if header.rank != 0:
        return "bad_rank"
    start = header.first_index - incoming.first_index
    stop = start + header.num_blocks
    if not 0 < header.num_blocks <= MAX_CHUNK_BLOCKS or start < 0 or stop > len(incoming.block_ids):
        return "outside_grant"
    if not 0 <= header.seq < MAX_CHUNKS or header.seq in incoming.chunk_seqs:
        return "duplicate_chunk"
    if any(incoming.arrived[start:stop]):
        return "duplicate_chunk"
    if header.num_bytes != header.num_blocks * memory.block_bytes:
        return "bad_length"
    if memory.is_host and header.checksum != checksum_blocks(
        memory, incoming.block_ids[start:stop]
    ):
        return "checksum_mismatch"
    return None


def mark_arrived(header: ChunkHeader, incoming: Incoming) -> None:
    """Count a verified chunk."""
    start = header.first_index - incoming.first_index
    incoming.arrived[start : start + header.num_blocks] = b"\x01" * header.num_blocks
    incoming.num_arrived += header.num_blocks
    incoming.chunk_seqs.add(header.seq)
