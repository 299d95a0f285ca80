"""Equal segments of a pool: what one write moves, from a list of them to a list of them.

A pool is cut every ``stride`` bytes, and of each cut the first ``num_bytes`` belong to a segment:

    stride    |-------|-------|-------|-------|      segment 2 starts at 2 * stride
    num_bytes |====   |====   |====   |====   |

A whole block is the segment of stride and length ``block_bytes``; a group of layers or a
tensor-parallel slice of a block is a smaller one, compressed KV a shorter one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]

SMALL_BYTES = 32 << 10
"""Below this, a call per segment costs more than numpy's copy through a temporary."""


@dataclass(frozen=True, slots=True)
class SegmentSize:
    """How both pools are cut."""

    stride: int
    num_bytes: int

    def fits(self, block_bytes: int) -> bool:
        """Whether segments of this size divide blocks of that one."""
        return 0 < self.num_bytes <= self.stride <= block_bytes and block_bytes % self.stride == 0

    @property
    def is_whole(self) -> bool:
        """Whether neighbouring segments touch each other."""
        return self.num_bytes == self.stride


def spans(ids: Sequence[int], size: SegmentSize) -> Iterator[tuple[int, int]]:
    """(offset, length) of the segments in order, neighbours that follow each other as one."""
    if not size.is_whole:
        yield from ((segment * size.stride, size.num_bytes) for segment in ids)
        return
    position = 0
    while position < len(ids):
        first, start = ids[position], position
        position += 1
        while position < len(ids) and ids[position] == first + position - start:
            position += 1
        yield first * size.stride, (position - start) * size.stride


def copy_segments(
    source: Bytes, source_ids: Sequence[int], target: Bytes, target_ids: Sequence[int],
    size: SegmentSize,
) -> None:  # fmt: skip
    """Copy segment ``source_ids[i]`` of one pool to ``target_ids[i]`` of another, ids checked."""
    if size.num_bytes < SMALL_BYTES:
        as_rows(target, size)[np.asarray(target_ids)] = as_rows(source, size)[
            np.asarray(source_ids)
        ]
        return
    for from_id, to_id in zip(source_ids, target_ids, strict=True):
        start, to = from_id * size.stride, to_id * size.stride
        # numpy, unlike a memoryview, lets other threads of the process run meanwhile.
        np.copyto(target[to : to + size.num_bytes], source[start : start + size.num_bytes])


def digest_segments(pool: Bytes, ids: Sequence[int], size: SegmentSize) -> list[int]:
    """xxh3-64 of every segment."""
    digests = []
    for segment in ids:
        start = segment * size.stride
        digests.append(xxhash.xxh3_64_intdigest(pool[start : start + size.num_bytes].data))
    return digests


def digest_blocks(
    pool: Bytes, ids: Sequence[int], size: SegmentSize, segments_per_block: int
) -> list[int]:
    """xxh3-64 of every block's share of the segments, in the order given."""
    if segments_per_block == 1:
        return digest_segments(pool, ids, size)
    rows, indices = as_rows(pool, size), np.asarray(ids)
    return [
        xxhash.xxh3_64_intdigest(rows[indices[start : start + segments_per_block]].data)
        for start in range(0, len(ids), segments_per_block)
    ]


def combine_digests(digests: Sequence[int]) -> int:
    """The checksum of a chunk: xxh3-64 over its blocks' digests, little-endian."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(digests)}Q", *digests))


def as_rows(pool: Bytes, size: SegmentSize) -> npt.NDArray[Any]:
    """The pool as [num_segments, num_bytes]."""
    whole = pool[: len(pool) // size.stride * size.stride]
    return whole.reshape(-1, size.stride)[:, : size.num_bytes]
