"""Paged attention on CPU: one numba call per layer for a whole ragged batch, prefill and decode.

Work is cut into tiles of up to ``TILE_TOKENS`` query tokens of one sequence and one KV head; the
query heads that share it (grouped-query attention) are rows of the same tile, so every K and V
value is read from memory once per tile. Softmax is computed online over spans of keys
(Milakov & Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135, algorithm 1).

A row's additions have one order, whatever tile it is in: decoding, prefilling in any chunks and
recomputing after a preemption give the same bits.

    keys of one sequence     | span 0: some blocks | span 1 | … | last span ..|
    a tile's rows            (q token 0, head 0) (q token 0, head 1) … (q token 1, head 0) …
    row r sees keys          max(0, pos_r - window + 1) … pos_r
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from engine.backends.cpu.intrinsics import copy_as_float32, exp_f32, inner, prefetch, softmax_row
from engine.backends.cpu.microkernel import fma_rows
from engine.backends.cpu.vector_ir import LANES
from engine.batch import BatchInputs

TILE_TOKENS = 16
"""Query tokens per tile: enough to reuse K and V from cache, small enough to balance threads."""

SPAN_KEYS = 64
"""Keys per round of the online softmax: few enough to stay in L1, many enough to amortise it."""

_NEG_INF = np.float32(-3.0e38)


@dataclass(slots=True, frozen=True)
class AttentionTiles:
    """One step's tiles, and which of them each thread takes. M tiles, R threads."""

    sequence: npt.NDArray[np.int32]
    """[M] row in the batch's block tables."""
    first_row: npt.NDArray[np.int32]
    """[M] first token row in the batch."""
    num_tokens: npt.NDArray[np.int32]
    """[M] 1 … TILE_TOKENS."""
    first_position: npt.NDArray[np.int32]
    """[M] absolute position of the first token."""
    thread_bounds: npt.NDArray[np.int64]
    """[R + 1] thread i takes tasks ``bounds[i] … bounds[i + 1]``; task = tile * Hkv + kv head."""


@dataclass(slots=True, frozen=True)
class CpuStep:
    """A begun step: what the model and the attention ops read of it."""

    batch: BatchInputs
    tiles: AttentionTiles
    token_ids: torch.Tensor
    sample_rows: torch.Tensor


def plan_tiles(batch: BatchInputs, num_kv_heads: int, num_threads: int) -> AttentionTiles:
    """Cut the batch into tiles and give each thread a contiguous share of equal cost."""
    counts = np.diff(batch.query_starts)
    tiles_per_seq = -(-counts // TILE_TOKENS)
    sequence = np.repeat(np.arange(len(counts), dtype=np.int32), tiles_per_seq)
    first_tile = np.cumsum(tiles_per_seq) - tiles_per_seq
    offset = (np.arange(len(sequence)) - first_tile[sequence]) * TILE_TOKENS
    num_tokens = np.minimum(counts[sequence] - offset, TILE_TOKENS).astype(np.int32)
    first_row = (batch.query_starts[sequence] + offset).astype(np.int32)
    first_position = batch.positions[first_row]
    cost = np.repeat(
        (first_position + num_tokens).astype(np.int64) * (num_tokens + 2), num_kv_heads
    )
    done = np.cumsum(cost)
    targets = done[-1] * np.arange(1, num_threads) / num_threads
    bounds = np.zeros(num_threads + 1, np.int64)
    bounds[1:-1] = np.searchsorted(done, targets, side="right")
    bounds[-1] = len(cost)
    return AttentionTiles(
        sequence, first_row, num_tokens, first_position, np.maximum.accumulate(bounds)
    )


@inner
def _load_query(qkv: Any, head: Any, group: Any, scale: Any, query: Any) -> None:
    """query[t * group + g] = scale * query head ``head * group + g`` of qkv[t]."""
    dim = query.shape[1]
    for t in range(qkv.shape[0]):
        for g in range(group):
            source = qkv[t, (head * group + g) * dim : (head * group + g + 1) * dim]
            target = query[t * group + g]
            for d in range(dim):
                target[d] = source[d] * scale


@inner
def _score_block(query: Any, num_rows: Any, keys: Any, scores: Any, first: Any) -> None:
    """scores[:num_rows, first : first + block_size] = query · keys, keys [D, block_size]."""
    dim, block_size = keys.shape
    fma_rows(
        0, num_rows, block_size // LANES, keys, query.ctypes.data, dim,
        keys.ctypes.data, block_size, LANES,
        scores.ctypes.data + first * 4, scores.shape[1], dim,
    )  # fmt: skip


@inner
def _score_two(
    query: Any, num_rows: Any, keys: Any, other_keys: Any, scores: Any, first: Any
) -> None:
    """As ``_score_block`` for two blocks of 16 keys: more sums than one that can wait."""
    dim, block_size = keys.shape
    step = (other_keys.ctypes.data - keys.ctypes.data) // keys.itemsize
    fma_rows(
        0, num_rows, 2, keys, query.ctypes.data, dim, keys.ctypes.data, block_size, step,
        scores.ctypes.data + first * 4, scores.shape[1], dim,
    )  # fmt: skip


@inner
def _add_values(
    scores: Any, num_rows: Any, values: Any, first: Any, num_keys: Any, acc: Any
) -> None:
    """acc[:num_rows] += scores[:, first : first + num_keys] · values[:num_keys]."""
    dim = values.shape[1]
    fma_rows(
        1, num_rows, dim // LANES, values, scores.ctypes.data + first * 4, scores.shape[1],
        values.ctypes.data, dim, LANES, acc.ctypes.data, dim, num_keys,
    )  # fmt: skip


@inner
def _apply_scales(scores: Any, num_rows: Any, first: Any, scales: Any) -> None:
    """scores[:num_rows, first:] *= scales, one per key of a block."""
    for r in range(num_rows):
        row = scores[r, first : first + scales.shape[0]]
        for k in range(scales.shape[0]):
            row[k] *= scales[k]


@inner
def _weigh_row(
    scores: Any, low: Any, high: Any, row: Any, maxima: Any, sums: Any, acc: Any
) -> None:
    """Turn a row's scores into weights, and bring what was summed before to the same scale."""
    if high <= low:
        scores[:] = np.float32(0.0)
        return
    top, total = softmax_row(scores, low, high, maxima[row])
    rescale = exp_f32(maxima[row] - top)
    maxima[row] = top
    sums[row] = sums[row] * rescale + total
    if rescale != np.float32(1.0):
        of_row = acc[row]
        for d in range(of_row.shape[0]):
            of_row[d] *= rescale


@inner
def _store_output(acc: Any, sums: Any, head: Any, group: Any, out: Any) -> None:
    """out[t], of query head ``head * group + g`` = acc / sums of row t * group + g."""
    dim = acc.shape[1]
    for t in range(out.shape[0]):
        for g in range(group):
            source = acc[t * group + g]
            target = out[t, (head * group + g) * dim : (head * group + g + 1) * dim]
            inverse = np.float32(1.0) / sums[t * group + g]
            for d in range(dim):
                target[d] = source[d] * inverse


@numba.njit(parallel=True, nogil=True, cache=True, boundscheck=False, error_model="numpy")
def paged_attention(
    qkv: Any, keys: Any, values: Any, scales: Any, layer: Any, block_tables: Any,
    tile_sequence: Any, tile_row: Any, tile_tokens: Any, tile_position: Any, bounds: Any,
    scale: Any, window: Any, out: Any,
) -> None:  # fmt: skip
    """Attention of every token over its sequence's cache.

    Takes qkv [T, (Hq + 2 Hkv) * D], the three arrays of a ``KVView``, the layer, block_tables
    [B, …], the five arrays of ``AttentionTiles``, the scale of scores, the window (0: unlimited)
    and out [T, Hq * D]. D and the block size are multiples of 16.
    """
    _, _, num_kv_heads, block_size, dim = values.shape
    group = out.shape[1] // (num_kv_heads * dim)
    span_blocks = max(1, SPAN_KEYS // block_size)
    span_keys = span_blocks * block_size
    scaled = scales.strides[4] != 0
    for thread in numba.prange(bounds.shape[0] - 1):
        query = np.empty((TILE_TOKENS * group, dim), np.float32)
        wide_keys = np.empty((dim, block_size), np.float32)
        wide_values = np.empty((block_size, dim), np.float32)
        scores = np.empty((TILE_TOKENS * group, span_keys), np.float32)
        acc = np.empty((TILE_TOKENS * group, dim), np.float32)
        maxima = np.empty(TILE_TOKENS * group, np.float32)
        sums = np.empty(TILE_TOKENS * group, np.float32)
        for task in range(bounds[thread], bounds[thread + 1]):
            tile = task // num_kv_heads
            head = task % num_kv_heads
            table = block_tables[tile_sequence[tile]]
            row0 = tile_row[tile]
            pos0 = tile_position[tile]
            tokens = tile_tokens[tile]
            num_rows = tokens * group
            # One row group reads K and V once: widened in registers. Several reuse them: in cache.
            reused = num_rows > 12 and values.itemsize < 4
            _load_query(qkv[row0 : row0 + tokens], head, group, scale, query)
            acc[:num_rows] = 0.0
            maxima[:num_rows] = _NEG_INF
            sums[:num_rows] = 0.0
            num_keys = pos0 + tokens
            first_block = max(0, pos0 - window + 1) // block_size if window > 0 else 0
            last_block = -(-num_keys // block_size)
            for span in range(first_block // span_blocks, -(-num_keys // span_keys)):
                key0 = span * span_keys
                begin = max(first_block, span * span_blocks)
                end = min((span + 1) * span_blocks, last_block)
                index = begin
                while index < end:
                    first = index * block_size - key0
                    stored = keys[table[index], layer, head]
                    index += 1
                    if reused:
                        copy_as_float32(stored, stored.size, wide_keys.ctypes.data)
                        _score_block(query, num_rows, wide_keys, scores, first)
                    elif block_size == LANES and index < end:
                        other = keys[table[index], layer, head]
                        _score_two(query, num_rows, stored, other, scores, first)
                        index += 1
                    else:
                        _score_block(query, num_rows, stored, scores, first)
                if scaled:
                    for index in range(begin, end):
                        of_keys = scales[table[index], layer, 0, head]
                        _apply_scales(scores, num_rows, index * block_size - key0, of_keys)
                for index in range(begin, end):
                    prefetch(values[table[index], layer, head], block_size * dim)
                for index in range(end, min(end + span_blocks, last_block)):
                    prefetch(keys[table[index], layer, head], block_size * dim)
                for row in range(num_rows):
                    position = pos0 + row // group
                    low = max(0, position - window + 1 - key0) if window > 0 else 0
                    high = min(span_keys, position + 1 - key0)
                    _weigh_row(scores[row], low, high, row, maxima, sums, acc)
                for index in range(begin, end):
                    first = index * block_size - key0
                    used = min(block_size, num_keys - index * block_size)
                    if scaled:
                        of_values = scales[table[index], layer, 1, head]
                        _apply_scales(scores, num_rows, first, of_values)
                    stored = values[table[index], layer, head]
                    if reused:
                        copy_as_float32(stored, stored.size, wide_values.ctypes.data)
                        _add_values(scores, num_rows, wide_values, first, used, acc)
                    else:
                        _add_values(scores, num_rows, stored, first, used, acc)
            _store_output(acc, sums, head, group, out[row0 : row0 + tokens])
