"""The pool of KV blocks: reference counts, the free queue and the prefix cache's index.

The pool hands out ids only; the bytes live in the KV cache. A block is in exactly one place:

    free queue   ref_count 0; may still carry a cached prefix (evictable, least recent first)
    in use       ref_count ≥ 1; owned by that many sequences
    quarantined  ref_count 1; no sequence owns it, but a remote write may still land in it
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class NoFreeBlocks(Exception):
    """Fewer free blocks than asked for; nothing was allocated."""


class BlockPool:
    """Reference-counted block ids ``0 … num_blocks - 1`` with hash-indexed reuse of full blocks."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._quarantined: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        """Blocks withheld because a remote write may still land in them."""
        return len(self._quarantined)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, evicting cached prefixes least recently used first.

        Raises:
            NoFreeBlocks: fewer are free; nothing changes.
        """
        if count > len(self._free):
            raise NoFreeBlocks(f"{count} blocks wanted, {len(self._free)} free")
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget_hash(block)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference each; unreferenced blocks become evictable in the order given.

        Pass a sequence's table reversed, so that a shared prefix outlives its continuations.
        """
        for block in blocks:
            count = self._ref_counts[block]
            assert count > 0, f"double free of block {block}"
            assert block not in self._quarantined, f"free of quarantined block {block}"
            self._ref_counts[block] = count - 1
            if count == 1:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Withhold blocks whose only owner gave them up while a remote write may be in flight.

        What they hold is no prefix any more.
        """
        for block in blocks:
            assert self._ref_counts[block] == 1, f"quarantine of shared block {block}"
            self._forget_hash(block)
            self._quarantined.add(block)

    def release_quarantined(self, blocks: Iterable[int]) -> None:
        """No remote write can land any more: make the blocks free."""
        blocks = list(blocks)
        for block in blocks:
            assert block in self._quarantined, f"block {block} is not quarantined"
            self._quarantined.remove(block)
        self.free(blocks)

    # ------------------------------------------------------------------ prefix cache

    def register(self, block: int, block_hash: bytes) -> None:
        """Publish a full, computed block under its chain hash; the first copy of a hash is kept."""
        assert self._ref_counts[block] > 0, f"register of free block {block}"
        if block_hash not in self._by_hash:
            self._forget_hash(block)
            self._by_hash[block_hash] = block
            self._hash_of[block] = block_hash

    def match(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Blocks cached for the longest matching prefix of the chain; takes no reference."""
        blocks = []
        for block_hash in block_hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def forget_cached(self) -> None:
        """Drop every cached prefix that no sequence uses."""
        for block in self._free:
            self._forget_hash(block)

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """How many of these are in the free queue (taking them lowers ``num_free``)."""
        return sum(1 for block in blocks if self._ref_counts[block] == 0)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Take one reference on each matched block."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def check_integrity(self) -> None:
        """Prove the invariants (idle and in tests); raises AssertionError."""
        for block, count in enumerate(self._ref_counts):
            assert count >= 0
            assert (count == 0) == (block in self._free), f"block {block} is lost"
        for block in self._quarantined:
            assert self._ref_counts[block] == 1
        for block_hash, block in self._by_hash.items():
            assert self._hash_of[block] == block_hash

    def _forget_hash(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hash_of[block] = None
