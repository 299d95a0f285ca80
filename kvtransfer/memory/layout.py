"""What lies where in a block, and which segments of it a write moves.

A block is ``[num_rows, heads, head_bytes]``; a row is one layer's K or V. A tensor-parallel rank's
pool holds the rows with only its own heads, so between pools of different ranks the same heads lie
at different places, one run in every row:

    P, heads 0-3   |0 1 2 3|0 1 2 3|0 1 2 3|…      segments 1, 3, 5 …  of two heads each
    D, heads 2-5   |2 3 4 5|2 3 4 5|2 3 4 5|…      segments 0, 2, 4 …

A part is a run of consecutive rows, so that the first layers can go while the last ones compute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtransfer.memory.segments import SegmentSize
from mesh.kv_heads import Heads, heads_of_rank

MAX_GRANT_BLOCKS = 1 << 16
"""A million tokens in blocks of 16."""
MAX_PARTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """Geometry of the blocks of one rank's pool."""

    num_rows: int
    """Layers times two."""
    heads: Heads
    """The rank's own."""
    head_bytes: int
    """One head of one row: all token slots of the block."""
    element: str = ""
    """numpy's name of the elements, or ``bfloat16``; empty where they can't be compressed."""

    @classmethod
    def opaque(cls, block_bytes: int) -> BlockLayout:
        """Blocks that are only ever moved whole."""
        return cls(num_rows=1, heads=Heads(start=0, stop=1), head_bytes=block_bytes)

    @property
    def block_bytes(self) -> int:
        """Size of a block."""
        return self.num_rows * len(self.heads) * self.head_bytes

    def segments(self, heads: Heads, stride: int) -> tuple[int, ...] | None:
        """The segments of one block that hold these heads, row by row; None where none fit exactly.

        Every segment lies within one row, unless the heads are all there are.
        """
        if stride <= 0 or not self.heads.holds(heads):
            return None
        if heads == self.heads:
            return None if self.block_bytes % stride else tuple(range(self.block_bytes // stride))
        row_bytes = len(self.heads) * self.head_bytes
        first = (heads.start - self.heads.start) * self.head_bytes
        run_bytes = len(heads) * self.head_bytes
        if row_bytes % stride or first % stride or run_bytes % stride:
            return None
        return tuple(
            (row * row_bytes + first) // stride + segment
            for row in range(self.num_rows)
            for segment in range(run_bytes // stride)
        )


@dataclass(frozen=True, slots=True)
class WritePlan:
    """How one transfer's blocks go from the sender's pool to the receiver's."""

    stride: int
    local: tuple[int, ...]
    """Segments of one block, in the sender's pool …"""
    remote: tuple[int, ...]
    """… and where each goes in the receiver's."""
    local_per_block: int
    remote_per_block: int
    num_parts: int

    @property
    def is_whole(self) -> bool:
        """Whether each part of a block is one segment and goes as it lies."""
        return self.local_per_block == len(self.local) == self.num_parts

    @property
    def size(self) -> SegmentSize:
        """Segments as they lie in both pools."""
        return SegmentSize(self.stride, self.stride)


def plan_write(
    sender: BlockLayout, receiver: BlockLayout, heads: Heads, num_parts: int
) -> WritePlan | None:
    """Plan with the largest segments that fit both pools; None where they do not go together."""
    if (sender.num_rows, sender.head_bytes) != (receiver.num_rows, receiver.head_bytes):
        return None
    if sender.num_rows % num_parts:
        return None
    if sender.heads == receiver.heads == heads:
        stride = sender.block_bytes // num_parts
    else:
        shared = math.gcd(
            len(heads), len(sender.heads), len(receiver.heads),
            heads.start - sender.heads.start, heads.start - receiver.heads.start,
        )  # fmt: skip
        stride = shared * sender.head_bytes
    local, remote = sender.segments(heads, stride), receiver.segments(heads, stride)
    if local is None or remote is None:
        return None
    return WritePlan(
        stride, local, remote,
        sender.block_bytes // stride, receiver.block_bytes // stride, num_parts,
    )  # fmt: skip


def part_of(segments: tuple[int, ...], part: int, num_parts: int) -> tuple[int, ...]:
    """The segments of one part of the rows."""
    share = len(segments) // num_parts
    return segments[part * share : (part + 1) * share]


def segment_ids(block_ids: tuple[int, ...], segments: tuple[int, ...], per_block: int) -> list[int]:
    """Those segments of each block, in order, numbered through the whole pool."""
    if len(segments) == per_block == 1:
        return list(block_ids)
    return [block * per_block + segment for block in block_ids for segment in segments]


def sources_of_rank(
    rank: int, tensor_parallel: int, sender_tensor_parallel: int, num_heads: int
) -> list[tuple[int, Heads]]:
    """Which sender rank writes which heads to a receiver's rank: each of its heads once.

    Where several sender ranks hold a head, the receiver's ranks spread over them.
    """
    wanted = heads_of_rank(rank, tensor_parallel, num_heads)
    copies = max(1, sender_tensor_parallel // num_heads)
    sources: list[tuple[int, Heads]] = []
    for sender_rank in range(sender_tensor_parallel):
        if sender_rank % copies != rank % copies:
            continue
        shared = heads_of_rank(sender_rank, sender_tensor_parallel, num_heads).overlap(wanted)
        if len(shared):
            sources.append((sender_rank, shared))
    return sources
