"""Paged attention on CPU: one numba call per layer for a whole ragged batch, prefill and decode.

Work is cut into tiles of up to ``TILE_TOKENS`` query tokens of one sequence and one KV head; the
query heads that share it (grouped-query attention) are rows of the same tile, so every K and V
value is read from memory once per tile. Softmax is computed online over KV blocks
(Milakov & Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135, algorithm 1).

A row's additions have one order, whatever tile it is in: decoding, prefilling in any chunks and
recomputing after a preemption give the same bits.

    keys of one sequence     | block 0 | block 1 | … | last block ..|
    a tile's rows            (q token 0, head 0) (q token 0, head 1) … (q token 1, head 0) …
    row r sees keys          max(0, pos_r - window + 1) … pos_r
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from engine.backends.cpu.intrinsics import as_float32, exp_f32
from engine.backends.cpu.microkernel import TILE_COLUMNS, TILE_ROWS, fma_tile
from engine.batch import BatchInputs
from mesh.errors import ConfigError

TILE_TOKENS = 16
"""Query tokens per tile: enough to reuse K and V from cache, small enough to balance threads."""

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


@lru_cache
def paged_attention_kernel(head_dim: int, group: int, block_size: int) -> Callable[..., None]:
    """Compile the kernel for one geometry; sizes are constants so that LLVM unrolls fully.

    The kernel takes ``(qkv [T, (Hq + 2 Hkv) * D], rows and scales of a KVView, layer,
    block_tables, tiles' five arrays, scale, window, out [T, Hq * D])``; ``window`` 0 is unlimited.

    Raises:
        ConfigError: a size is not a multiple of 16.
    """
    if block_size % TILE_COLUMNS or head_dim % TILE_COLUMNS:
        raise ConfigError(
            f"block_size: {block_size} and the model's head_dim {head_dim} must be multiples of "
            f"{TILE_COLUMNS}"
        )
    D, G, BS = head_dim, group, block_size
    MAX_ROWS = -(-TILE_TOKENS * group // TILE_ROWS) * TILE_ROWS

    @numba.njit(
        parallel=True, nogil=True, cache=True, fastmath=True, boundscheck=False,
        error_model="numpy",
    )  # fmt: skip
    def kernel(
        qkv: Any, kv: Any, kv_scales: Any, layer: Any, block_tables: Any,
        tile_sequence: Any, tile_row: Any, tile_tokens: Any, tile_position: Any, bounds: Any,
        scale: Any, window: Any, out: Any,
    ) -> None:  # fmt: skip
        num_kv_heads = kv.shape[3]
        for thread in numba.prange(bounds.shape[0] - 1):
            query = np.empty((MAX_ROWS, D), np.float32)
            keys = np.empty((D, BS), np.float32)
            values = np.empty((BS, D), np.float32)
            scores = np.empty((MAX_ROWS, BS), np.float32)
            acc = np.empty((MAX_ROWS, D), np.float32)
            row_max = np.empty(MAX_ROWS, np.float32)
            row_sum = np.empty(MAX_ROWS, np.float32)
            query_at = query.ctypes.data
            keys_at = keys.ctypes.data
            values_at = values.ctypes.data
            scores_at = scores.ctypes.data
            acc_at = acc.ctypes.data
            for task in range(bounds[thread], bounds[thread + 1]):
                tile = task // num_kv_heads
                head = task % num_kv_heads
                table = block_tables[tile_sequence[tile]]
                row0 = tile_row[tile]
                pos0 = tile_position[tile]
                tokens = tile_tokens[tile]
                rows = tokens * G
                padded = -(-rows // TILE_ROWS) * TILE_ROWS
                for t in range(tokens):
                    for g in range(G):
                        column = (head * G + g) * D
                        for d in range(D):
                            query[t * G + g, d] = qkv[row0 + t, column + d] * scale
                for r in range(padded):
                    row_max[r] = _NEG_INF
                    row_sum[r] = 0.0
                    for d in range(D):
                        acc[r, d] = 0.0
                for r in range(rows, padded):
                    for d in range(D):
                        query[r, d] = 0.0
                num_keys = pos0 + tokens
                first_block = 0
                if window > 0:
                    first_block = max(0, pos0 - window + 1) // BS
                for index in range(first_block, (num_keys + BS - 1) // BS):
                    key0 = index * BS
                    used = min(BS, num_keys - key0)
                    block = table[index]
                    for k in range(used):
                        factor = kv_scales[block, layer, 1, head, k]
                        stored = kv[block, layer, 1, head, k]
                        for d in range(D):
                            values[k, d] = as_float32(stored[d]) * factor
                    for k in range(used):
                        factor = kv_scales[block, layer, 0, head, k]
                        stored = kv[block, layer, 0, head, k]
                        for d in range(D):
                            keys[d, k] = as_float32(stored[d]) * factor
                    for r in range(0, padded, TILE_ROWS):
                        for i in range(TILE_ROWS):
                            for k in range(BS):
                                scores[r + i, k] = 0.0
                        for column in range(0, BS, TILE_COLUMNS):
                            fma_tile(
                                query_at + r * D * 4, D,
                                keys_at + column * 4, BS,
                                scores_at + (r * BS + column) * 4, BS,
                                D,
                            )  # fmt: skip
                    for r in range(rows):
                        position = pos0 + r // G
                        low = 0
                        if window > 0:
                            low = max(0, position - window + 1 - key0)
                        high = min(BS, position + 1 - key0)
                        if high <= low:
                            for k in range(BS):
                                scores[r, k] = 0.0
                            continue
                        top = row_max[r]
                        for k in range(low, high):
                            top = max(top, scores[r, k])
                        rescale = exp_f32(row_max[r] - top)
                        row_max[r] = top
                        total = np.float32(0.0)
                        for k in range(BS):
                            # Slots outside low … high may hold anything, NaN included.
                            inside = low <= k and k < high
                            p = exp_f32(min(scores[r, k] - top, np.float32(0.0)))
                            p = p if inside else np.float32(0.0)
                            scores[r, k] = p
                            total += p
                        row_sum[r] = row_sum[r] * rescale + total
                        if rescale != np.float32(1.0):
                            for d in range(D):
                                acc[r, d] *= rescale
                    for r in range(0, padded, TILE_ROWS):
                        for column in range(0, D, TILE_COLUMNS):
                            fma_tile(
                                scores_at + r * BS * 4, BS,
                                values_at + column * 4, D,
                                acc_at + (r * D + column) * 4, D,
                                used,
                            )  # fmt: skip
                for t in range(tokens):
                    for g in range(G):
                        r = t * G + g
                        inverse = np.float32(1.0) / row_sum[r]
                        column = (head * G + g) * D
                        for d in range(D):
                            out[row0 + t, column + d] = acc[r, d] * inverse

    return kernel
