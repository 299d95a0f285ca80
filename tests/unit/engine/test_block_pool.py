"""The block pool through random orders of everything its owners may do, against a naive model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine.cache.block_pool import BlockPool, NoFreeBlocks

PICK = st.integers(min_value=0, max_value=1 << 16)
HASHES = [bytes([i]) for i in range(6)]


class BlockPoolMachine(RuleBasedStateMachine):
    """``owners`` holds the references that someone has; what it lacks must be free."""

    @initialize(num_blocks=st.integers(1, 8))
    def create(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.owners: list[list[int]] = []
        self.quarantined: list[list[int]] = []
        self.cached: dict[bytes, int] = {}
        self.free_order: list[int] = list(range(num_blocks))

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        if count > len(self.free_order):
            with pytest.raises(NoFreeBlocks):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert blocks == self.free_order[:count]
        del self.free_order[:count]
        self.cached = {h: b for h, b in self.cached.items() if b not in blocks}
        if blocks:
            self.owners.append(blocks)

    @precondition(lambda self: self.owners)
    @rule(pick=PICK)
    def free(self, pick: int) -> None:
        self._free(self.owners.pop(pick % len(self.owners)))

    @precondition(lambda self: self.owners)
    @rule(pick=PICK, hash_pick=PICK)
    def register(self, pick: int, hash_pick: int) -> None:
        owned = self.owners[pick % len(self.owners)]
        block, block_hash = owned[pick % len(owned)], HASHES[hash_pick % len(HASHES)]
        self.pool.register(block, block_hash)
        if block_hash not in self.cached:
            self.cached = {h: b for h, b in self.cached.items() if b != block}
            self.cached[block_hash] = block

    @rule(chain=st.lists(st.sampled_from(HASHES), unique=True))
    def match_and_acquire(self, chain: list[bytes]) -> None:
        expected = []
        for block_hash in chain:
            if block_hash not in self.cached:
                break
            expected.append(self.cached[block_hash])
        assert self.pool.match(chain) == expected
        num_free = [b for b in expected if b in self.free_order]
        assert self.pool.num_free_among(expected) == len(num_free)
        self.pool.acquire(expected)
        self.free_order = [b for b in self.free_order if b not in expected]
        if expected:
            self.owners.append(expected)

    @rule(pick=PICK)
    def quarantine(self, pick: int) -> None:
        alone = [o for o in self.owners if all(self._count(block) == 1 for block in o)]
        if alone:
            blocks = alone[pick % len(alone)]
            self.owners.remove(blocks)
            self.pool.quarantine(blocks)
            self.quarantined.append(blocks)
            self.cached = {h: b for h, b in self.cached.items() if b not in blocks}

    @precondition(lambda self: self.quarantined)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        blocks = self.quarantined.pop(pick % len(self.quarantined))
        self.pool.release_quarantined(blocks)
        self._became_free(blocks)

    @rule()
    def forget_cached(self) -> None:
        self.pool.forget_cached()
        self.cached = {h: b for h, b in self.cached.items() if b not in self.free_order}

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        assert self.pool.num_free == len(self.free_order)
        assert self.pool.num_quarantined == sum(len(blocks) for blocks in self.quarantined)
        for block_hash in HASHES:
            expected = [self.cached[block_hash]] if block_hash in self.cached else []
            assert self.pool.match([block_hash]) == expected

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            while self.owners:
                self._free(self.owners.pop())
            while self.quarantined:
                self.pool.release_quarantined(self.quarantined.pop())
            self.pool.check_integrity()
            assert self.pool.num_free == self.pool.num_blocks

    def _count(self, block: int) -> int:
        return sum(blocks.count(block) for blocks in self.owners)

    def _free(self, blocks: list[int]) -> None:
        self.pool.free(blocks)
        self._became_free([block for block in blocks if self._count(block) == 0])

    def _became_free(self, blocks: list[int]) -> None:
        """Blocks without a cached prefix are reused first, then the longest unused ones."""
        for block in blocks:
            position = len(self.free_order) if block in self.cached.values() else 0
            self.free_order.insert(position, block)


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_refused_allocation_changes_nothing() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(NoFreeBlocks):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check_integrity()


def test_misuse_is_an_assertion() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.free([block])
    with pytest.raises(AssertionError, match="double free"):
        pool.free([block])
    with pytest.raises(AssertionError, match="register of free"):
        pool.register(block, b"h")
    (shared,) = pool.allocate(1)
    pool.acquire([shared])
    with pytest.raises(AssertionError, match="shared"):
        pool.quarantine([shared])
    with pytest.raises(AssertionError, match="not quarantined"):
        pool.release_quarantined([shared])
    (withheld,) = pool.allocate(1)
    pool.quarantine([withheld])
    with pytest.raises(AssertionError, match="quarantined"):
        pool.free([withheld])


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)


def test_a_prefix_outlives_its_continuations() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    for block, block_hash in zip(table, HASHES, strict=False):
        pool.register(block, block_hash)
    pool.free(reversed(table))
    pool.allocate(2)
    assert pool.match(HASHES) == [table[0]]
