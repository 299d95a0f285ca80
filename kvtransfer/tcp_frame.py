"""Bytes on a TCP data connection. All integers little-endian.

dialer, once   magic "PDKV" | version u32 | token 16 bytes       which endpoint this is for
dialer, frame  header_len u32 | num_blocks u32 | header | block ids u32 × num_blocks | blocks
listener       write count u64                                  after each frame, cumulative
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

TCP_VERSION = 1
TOKEN_BYTES = 16
GREETING = struct.Struct("<4sI16s")
MAGIC = b"PDKV"
PREFIX = struct.Struct("<II")
RECEIPT = struct.Struct("<Q")


def pack_frame_head(header: bytes, block_ids: Sequence[int]) -> bytes:
    """Everything of a frame before the blocks' bytes."""
    ids = struct.pack(f"<{len(block_ids)}I", *block_ids)
    return PREFIX.pack(len(header), len(block_ids)) + header + ids


def unpack_block_ids(data: bytes | memoryview) -> tuple[int, ...]:
    """The block ids of a frame head."""
    return struct.unpack(f"<{len(data) // 4}I", data)
