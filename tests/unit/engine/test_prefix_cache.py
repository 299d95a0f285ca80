"""What two sequences may share: equal tokens from the start on, of whole blocks, under one salt."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.block_pool import BlockPool
from engine.cache.prefix_cache import PrefixCache
from engine.sequence import Sequence
from tests.unit.engine.tiny_llama import new_sequence

BLOCK_SIZE = 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
SALTS = st.sampled_from(["", "a", "b"])


def published(cache: PrefixCache, pool: BlockPool, tokens: list[int], salt: str) -> Sequence:
    sequence = new_sequence(tokens, cache_salt=salt)
    sequence.block_table = pool.allocate(-(-len(tokens) // BLOCK_SIZE))
    sequence.num_computed_tokens = len(tokens)
    cache.publish(sequence, sequence.num_computed_tokens)
    return sequence


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(TOKENS, SALTS), min_size=1, max_size=4), TOKENS, SALTS)
def test_a_match_is_the_longest_common_run_of_whole_blocks_of_one_salt(
    known: list[tuple[list[int], str]], tokens: list[int], salt: str
) -> None:
    pool = BlockPool(32)
    cache = PrefixCache(pool, BLOCK_SIZE)
    owners = [(published(cache, pool, *entry), entry) for entry in known]
    usable = (len(tokens) - 1) // BLOCK_SIZE
    longest = 0
    for _, (other, other_salt) in owners:
        shared = 0
        while (
            other_salt == salt
            and shared < min(usable, len(other) // BLOCK_SIZE)
            and other[: (shared + 1) * BLOCK_SIZE] == tokens[: (shared + 1) * BLOCK_SIZE]
        ):
            shared += 1
        longest = max(longest, shared)
    blocks = cache.match(new_sequence(tokens, cache_salt=salt))
    assert len(blocks) == longest
    contents = {
        block: (other_salt, other[: (index + 1) * BLOCK_SIZE])
        for sequence, (other, other_salt) in owners
        for index, block in enumerate(sequence.block_table)
    }
    for index, block in enumerate(blocks):
        assert contents[block] == (salt, tokens[: (index + 1) * BLOCK_SIZE])


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_one_token_is_always_left_to_compute(length: int) -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, BLOCK_SIZE)
    published(cache, pool, [1] * 8, "")
    blocks = cache.match(new_sequence([1] * length))
    assert len(blocks) * BLOCK_SIZE < length
    assert len(blocks) == (length - 1) // BLOCK_SIZE


def test_a_block_is_published_only_when_all_of_it_is_computed() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, BLOCK_SIZE)
    sequence = new_sequence([0, 1, 0, 1])
    sequence.block_table = pool.allocate(2)
    found = []
    for computed in range(5):
        sequence.num_computed_tokens = computed
        cache.publish(sequence, sequence.num_computed_tokens)
        found.append(len(cache.match(new_sequence([0, 1, 0, 1, 0]))))
    assert found == [0, 0, 1, 1, 2]


def test_the_chain_tells_moved_tokens_and_other_beginnings_apart() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, BLOCK_SIZE)
    published(cache, pool, [0, 1, 2, 3], "")
    assert cache.match(new_sequence([2, 3, 0, 1])) == []
    assert cache.match(new_sequence([9, 9, 2, 3, 0])) == []


def test_the_salt_of_a_request_is_not_mistaken_for_tokens() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, BLOCK_SIZE)
    first, second = new_sequence([0, 1, 2]), new_sequence([0, 1, 2], cache_salt="x")
    cache.match(first)
    cache.match(second)
    assert first.block_hashes != second.block_hashes


def test_a_disabled_cache_shares_nothing() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, BLOCK_SIZE, enabled=False)
    published(cache, pool, [0, 1, 2, 3], "")
    assert cache.match(new_sequence([0, 1, 2, 3])) == []
