"""Batch building against a reference that walks every token of every chunk."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import build_batch
from engine.scheduling.step_plan import ScheduledChunk
from tests.unit.engine.tiny_llama import new_sequence


@st.composite
def chunks(draw: st.DrawFn) -> tuple[int, list[ScheduledChunk]]:
    block_size = draw(st.sampled_from([1, 2, 16, 32]))
    result = []
    free = list(range(400))
    for _ in range(draw(st.integers(1, 5))):
        total = draw(st.integers(1, 40))
        computed = draw(st.integers(0, total - 1))
        scheduled = draw(st.integers(1, total - computed))
        tokens = draw(st.lists(st.integers(0, 1 << 20), min_size=total, max_size=total))
        sequence = new_sequence(tokens)
        sequence.num_computed_tokens = computed
        spare = draw(st.integers(0, 2))
        for _ in range(-(-total // block_size) + spare):
            sequence.block_table.append(free.pop(draw(st.integers(0, len(free) - 1))))
        result.append(ScheduledChunk(sequence, scheduled))
    return block_size, result


@settings(max_examples=100, deadline=None)
@given(chunks())
def test_every_array_equals_the_walk_over_tokens(case: tuple[int, list[ScheduledChunk]]) -> None:
    block_size, scheduled = case
    batch = build_batch(scheduled, block_size)
    row = 0
    sample_rows = []
    for index, chunk in enumerate(scheduled):
        sequence = chunk.sequence
        assert batch.query_starts[index] == row
        first = sequence.num_computed_tokens
        for position in range(first, first + chunk.num_scheduled_tokens):
            block = sequence.block_table[position // block_size]
            assert batch.token_ids[row] == sequence.token_ids[position]
            assert batch.positions[row] == position
            assert batch.slot_mapping[row] == block * block_size + position % block_size
            row += 1
        assert batch.context_lens[index] == first + chunk.num_scheduled_tokens
        table = batch.block_tables[index].tolist()
        length = len(sequence.block_table)
        assert table[:length] == sequence.block_table
        assert not any(table[length:])
        if first + chunk.num_scheduled_tokens == sequence.num_tokens:
            sample_rows.append(row - 1)
    assert batch.num_tokens == row == batch.query_starts[-1]
    assert batch.sample_rows.tolist() == sample_rows
    lengths = {len(batch.token_ids), len(batch.positions), len(batch.slot_mapping)}
    assert lengths == {row}


def test_the_arrays_have_the_kernels_types() -> None:
    sequence = new_sequence([1, 2, 3])
    sequence.block_table = [0]
    batch = build_batch([ScheduledChunk(sequence, 3)], 16)
    assert batch.token_ids.dtype == batch.slot_mapping.dtype == np.int64
    assert batch.sample_rows.dtype == np.int64
    for array in (batch.positions, batch.query_starts, batch.context_lens, batch.block_tables):
        assert array.dtype == np.int32
