"""Bytes on the socket of a data connection (transports ``tcp`` and ``shm``). Little-endian.

dialer, once   magic "PDKV" | version u32 | token 16 bytes       which endpoint this is for
dialer, frame  header_len u32 | num_segments u32 | stride u64 | segment_bytes u64
               header | segment ids u32 × num_segments            which of the listener's pool
               tcp: the segments' bytes
               shm: source segment ids u32 × num_segments            in the pool that came as a file
listener       write count u64                                   after each frame, cumulative

With ``shm`` the greeting carries the dialer's pool: one file descriptor (SCM_RIGHTS).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvtransfer.memory.segments import SegmentSize

FRAME_VERSION = 2
TOKEN_BYTES = 16
GREETING = struct.Struct("<4sI16s")
MAGIC = b"PDKV"
PREFIX = struct.Struct("<IIQQ")
RECEIPT = struct.Struct("<Q")


def pack_frame_head(header: bytes, size: SegmentSize, *ids: Sequence[int]) -> bytes:
    """Everything of a frame before the segments' bytes; one or two lists of segment ids."""
    prefix = PREFIX.pack(len(header), len(ids[0]), size.stride, size.num_bytes)
    return b"".join((prefix, header, *(struct.pack(f"<{len(some)}I", *some) for some in ids)))


def unpack_ids(data: bytes | memoryview) -> tuple[int, ...]:
    """A list of segment ids."""
    return struct.unpack(f"<{len(data) // 4}I", data)
