"""Hash chains over full blocks: equal hash means equal tokens and equal everything before them."""

from __future__ import annotations

import hashlib

import numpy as np

from engine.cache.block_pool import BlockPool
from engine.sequence import Sequence

_DIGEST_BYTES = 16


class PrefixCache:
    """Finds and publishes computed prefixes in a block pool.

    The chain is BLAKE2b over (parent hash, token ids), rooted in the request's ``cache_salt``: a
    collision would serve another request's KV, so the hash is cryptographic, and requests of
    different salts share nothing.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, enabled: bool = True) -> None:
        self._pool = pool
        self._block_size = block_size
        self._enabled = enabled

    def match(self, sequence: Sequence) -> list[int]:
        """Cached blocks for the sequence's longest known prefix, without taking references.

        At least one token is always left to compute, since its logits choose the next one.
        """
        if not self._enabled:
            return []
        self._extend_hashes(sequence)
        reusable = (sequence.num_tokens - 1) // self._block_size
        return self._pool.match(sequence.block_hashes[:reusable])

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Register the full blocks of its first ``num_tokens``, computed since the last call."""
        if not self._enabled:
            return
        full = num_tokens // self._block_size
        if full <= sequence.num_registered_blocks:
            return
        self._extend_hashes(sequence)
        for index in range(sequence.num_registered_blocks, full):
            self._pool.register(sequence.block_table[index], sequence.block_hashes[index])
        sequence.num_registered_blocks = full

    def _extend_hashes(self, sequence: Sequence) -> None:
        size = self._block_size
        hashes = sequence.block_hashes
        parent = hashes[-1] if hashes else hashlib.blake2b(sequence.cache_salt.encode()).digest()
        for index in range(len(hashes), sequence.num_tokens // size):
            tokens = np.asarray(sequence.token_ids[index * size : (index + 1) * size], np.int32)
            parent = hashlib.blake2b(parent + tokens.tobytes(), digest_size=_DIGEST_BYTES).digest()
            hashes.append(parent)
