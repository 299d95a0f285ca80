"""Steps of every kind of size, so that no kernel is compiled while requests wait.

Triton compiles for whether an argument is 1 or a multiple of 16, and kernels choose their tiles by
the number of tokens. The steps write no KV, and what they read is whatever the first block holds.
"""

from __future__ import annotations

import numpy as np

from engine.backend import StepSizes
from engine.batch import BatchInputs

_NUM_TOKENS = (2, 5, 8, 12, 16, 24, 48, 64, 100, 128, 200, 256)
"""On both sides of where kernels change their tiles, multiples of 16 and others."""


def steps_to_compile(sizes: StepSizes, block_size: int) -> list[BatchInputs]:
    """Chunks of one prompt, the largest step first, each once alone and once after a decode."""
    most = min(sizes.num_tokens, sizes.num_blocks * block_size)
    counts = sorted({most, most - 1, *_NUM_TOKENS} & set(range(2, most + 1)), reverse=True)
    batches = [_batch([count], block_size) for count in counts]
    if sizes.num_sequences > 1:
        batches += [_batch([1, count - 1], block_size) for count in counts if count > 2]
    return batches


def _batch(counts: list[int], block_size: int) -> BatchInputs:
    """One chunk from the start of each of several sequences, all in block 0, stored nowhere."""
    lengths = np.array(counts, np.int32)
    num_tokens = int(lengths.sum())
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return BatchInputs(
        token_ids=np.zeros(num_tokens, np.int64),
        token_sources=np.full(num_tokens, -1, np.int32),
        positions=np.zeros(num_tokens, np.int32),  # within any rotary table
        slot_mapping=np.full(num_tokens, -1, np.int64),
        query_starts=starts,
        context_lens=lengths,
        block_tables=np.zeros((len(counts), -(-max(counts) // block_size)), np.int32),
        sample_rows=(starts[1:] - 1).astype(np.int64),
    )
