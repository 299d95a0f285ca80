"""What one forward computes, as flat arrays: the seam between scheduling and tensors."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.scheduling.step_plan import ScheduledChunk

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class BatchInputs:
    """Ragged batch of chunks, concatenated.

    Legend: T tokens in all, B sequences, N sampled rows.

    ::

        token_ids      | seq 0 chunk | seq 1 chunk | … |
        query_starts   0             ^             ^      (B + 1 offsets)
    """

    token_ids: Int64Array
    """[T]"""
    token_sources: Int32Array
    """[T] -1, or which sampled row of the previous step has drawn this token: nobody knew it yet
    when the batch was built, and it is read from there."""
    positions: Int32Array
    """[T] absolute position of each token in its sequence."""
    slot_mapping: Int64Array
    """[T] ``block_id * block_size + offset`` where each token's KV is written."""
    query_starts: Int32Array
    """[B + 1] first row of each sequence's chunk."""
    context_lens: Int32Array
    """[B] tokens visible to the chunk's last token: computed before plus the chunk itself."""
    block_tables: Int32Array
    """[B, max blocks of any] padded with 0."""
    sample_rows: Int64Array
    """[N] rows whose logits are wanted, in chunk order."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)


def build_batch(chunks: SequenceOf[ScheduledChunk], block_size: int) -> BatchInputs:
    """Lay the scheduled chunks out as one ragged batch."""
    num_seqs = len(chunks)
    counts = np.fromiter((c.num_scheduled_tokens for c in chunks), np.int32, num_seqs)
    starts = np.fromiter((c.start for c in chunks), np.int32, num_seqs)
    query_starts = np.zeros(num_seqs + 1, np.int32)
    np.cumsum(counts, out=query_starts[1:])
    token_ids: list[int] = []
    token_sources = np.full(query_starts[-1], -1, np.int32)
    for chunk in chunks:
        token_ids += chunk.sequence.token_ids[chunk.start : chunk.end]
        if chunk.end > chunk.sequence.num_tokens:
            token_sources[len(token_ids)] = chunk.sequence.pending_row
            token_ids.append(0)
    width = max(len(c.sequence.block_table) for c in chunks)
    block_tables = np.zeros((num_seqs, width), np.int32)
    for row, chunk in enumerate(chunks):
        table = chunk.sequence.block_table
        block_tables[row, : len(table)] = table
    row_of_token = np.repeat(np.arange(num_seqs), counts)
    offset_in_chunk = np.arange(query_starts[-1], dtype=np.int32) - query_starts[row_of_token]
    positions = (starts[row_of_token] + offset_in_chunk).astype(np.int32)
    blocks = block_tables[row_of_token, positions // block_size].astype(np.int64)
    samples = np.fromiter((c.samples for c in chunks), np.bool_, num_seqs)
    return BatchInputs(
        token_ids=np.asarray(token_ids, np.int64),
        token_sources=token_sources,
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        query_starts=query_starts,
        context_lens=(starts + counts).astype(np.int32),
        block_tables=block_tables,
        sample_rows=(query_starts[1:][samples] - 1).astype(np.int64),
    )
