"""Bytes on the socket of a data connection (transports ``tcp`` and ``shm``). Little-endian.

dialer, once   magic "PDKV" | version u32 | token 16 bytes       which endpoint this is for
dialer, frame  header_len u32 | num_pieces u32 | stride u64 | piece_bytes u64
               header | piece ids u32 × num_pieces               which pieces of the listener's pool
               tcp: the pieces' bytes
               shm: source piece ids u32 × num_pieces            in the pool that came as a file
listener       write count u64                                   after each frame, cumulative

With ``shm`` the greeting carries the dialer's pool: one file descriptor (SCM_RIGHTS).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvtransfer.memory.segments import PieceSize

FRAME_VERSION = 2
TOKEN_BYTES = 16
GREETING = struct.Struct("<4sI16s")
MAGIC = b"PDKV"
PREFIX = struct.Struct("<IIQQ")
RECEIPT = struct.Struct("<Q")


def pack_frame_head(header: bytes, size: PieceSize, *ids: Sequence[int]) -> bytes:
    """Everything of a frame before the pieces' bytes; one or two lists of piece ids."""
    prefix = PREFIX.pack(len(header), len(ids[0]), size.stride, size.num_bytes)
    return b"".join((prefix, header, *(struct.pack(f"<{len(some)}I", *some) for some in ids)))


def unpack_ids(data: bytes | memoryview) -> tuple[int, ...]:
    """A list of piece ids."""
    return struct.unpack(f"<{len(data) // 4}I", data)
