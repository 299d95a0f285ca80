"""xxh3-64 over a list of blocks in logical order."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from kvtransfer.pool import BlockMemory


def checksum_blocks(memory: BlockMemory, block_ids: Sequence[int]) -> int:
    """Hash the blocks' bytes in the order given; 0 for device memory, which the CPU can't read."""
    if not memory.is_host:
        return 0
    digest = xxhash.xxh3_64()
    for block_id in block_ids:
        digest.update(memory.block(block_id))
    return digest.intdigest()
