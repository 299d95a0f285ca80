"""Chunk headers: what a sender says about one write, and what the receiver makes of it.

granted:   first_index … first_index + len(block_ids)
                |----+----+----+----+----+----|
chunk:                    |----+----|           header.first_index, num_blocks

Of these blocks the chunk holds one part (a run of rows), of these rows the granted heads.
"""

from __future__ import annotations

from kvtransfer.memory.compression import ENCODINGS, decode_segments, encoded_size
from kvtransfer.memory.layout import MAX_PARTS, BlockLayout, part_of, segment_ids
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.memory.segments import SegmentSize, combine_digests, digest_blocks
from kvtransfer.receiver.state import Incoming
from kvtransfer.transports.base import MAX_CHUNK_SEGMENTS, MAX_HEADER_BYTES
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


def accept_chunk(
    header: ChunkHeader,
    digests: list[int] | None,
    incoming: Incoming,
    memory: BlockMemory,
    layout: BlockLayout,
    epoch: int,
) -> str | None:
    """Check an arrived chunk and count it; compressed segments are expanded in place.

    Reads the blocks, unless their ``digests`` are known, so it is called once per chunk.

    Returns:
        The stable code of what is wrong, and nothing is changed; None if its blocks are good.
    """
    fault = _header_fault(header, incoming, epoch)
    if fault is not None:
        return fault
    segments = layout.segments(incoming.heads or layout.heads, header.stride)
    if segments is None or len(segments) % header.num_parts:
        return "bad_pieces"
    size: SegmentSize | None = SegmentSize(header.stride, header.stride)
    if header.encoding:
        size = encoded_size(header.stride, layout.element)
    ours = part_of(segments, header.part, header.num_parts)
    num_segments = header.num_blocks * len(ours)
    if size is None or num_segments > MAX_CHUNK_SEGMENTS:
        return "bad_pieces"
    if header.num_bytes != num_segments * size.num_bytes:
        return "bad_length"
    start = header.first_index - incoming.first_index
    block_ids = incoming.block_ids[start : start + header.num_blocks]
    ids = segment_ids(block_ids, ours, layout.block_bytes // header.stride)
    if memory.is_host:
        if digests is None or len(digests) != header.num_blocks:
            digests = digest_blocks(memory.array, ids, size, len(ours))
        if header.checksum != combine_digests(digests):
            return "checksum_mismatch"
    if header.encoding:
        decode_segments(memory.array, ids, header.stride, layout.element)
    incoming.mark_arrived(header.seq, start, header.num_blocks, header.part)
    return None


def _header_fault(header: ChunkHeader, incoming: Incoming, epoch: int) -> str | None:
    if header.epoch != epoch or header.sender_epoch != incoming.sender.epoch:
        return "stale_epoch"
    if header.rank != incoming.rank:
        return "bad_rank"
    start = header.first_index - incoming.first_index
    stop = start + header.num_blocks
    if header.num_blocks <= 0 or start < 0 or stop > len(incoming.block_ids):
        return "outside_grant"
    if not 0 < header.num_parts <= MAX_PARTS or not 0 <= header.part < header.num_parts:
        return "bad_pieces"
    if header.encoding not in ENCODINGS or (
        header.encoding and header.encoding != incoming.encoding
    ):
        return "bad_encoding"
    if not 0 <= header.seq < MAX_CHUNKS or header.seq in incoming.chunk_seqs:
        return "duplicate_chunk"
    if not incoming.has_parts(header.num_parts):
        return "bad_pieces"
    if incoming.has_any(start, stop, header.part):
        return "duplicate_chunk"
    return None
