"""KV blocks between the pool and a contiguous staging buffer, for a transfer.

Some KV heads of every row (a layer's K or V) are taken: another tensor-parallel rank's share. The
keys may change their layout on the way: the CPU's lie as ``[D, block_size]``, this backend's as
``[block_size, D]`` (``kv_view``)::

    pool     block 7 |row 0: h0 h1 h2 h3|row 1: h0 h1 h2 h3|…
    staging  [0]     |row 0:    h1 h2   |row 1:    h1 h2   |…     heads 1 to 3 (exclusive)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.backend import KVCacheSpec
from engine.backends.gpu.kv_view import ELEMENT_DTYPES
from engine.backends.gpu.variant import Variant

_WORD_BYTES = 4
_WORDS = 2048
"""int32 words of one program: 4 loads of 16 bytes in flight for each thread."""
_TILE_ELEMENTS = 4096
_STORED_AS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@triton.jit
def _copy_kernel(
    pool_ptr, staging_ptr, ids_ptr,
    block_stride, row_stride, staging_block_stride, first_word, run_words,
    WORDS: tl.constexpr, TO_POOL: tl.constexpr,
):  # fmt: skip
    """One row's run of heads as it lies, ``WORDS`` words of it."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    block = tl.load(ids_ptr + index).to(tl.int64)
    word = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    pool = pool_ptr + block * block_stride + row * row_stride + first_word + word
    staging = staging_ptr + index * staging_block_stride + row * run_words + word
    if TO_POOL:
        tl.store(pool, tl.load(staging, mask=word < run_words), mask=word < run_words)
    else:
        tl.store(staging, tl.load(pool, mask=word < run_words), mask=word < run_words)


@triton.jit
def _move_tile(
    pool_ptr, staging_ptr, tokens, d, mask,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TURNED: tl.constexpr, TO_POOL: tl.constexpr,
):  # fmt: skip
    by_token = tokens[:, None] * HEAD_DIM + d[None, :]
    pool = pool_ptr + by_token
    staging = staging_ptr + (tokens[:, None] + d[None, :] * BLOCK_SIZE if TURNED else by_token)
    if TO_POOL:
        tl.store(pool, tl.load(staging, mask=mask), mask=mask)
    else:
        tl.store(staging, tl.load(pool, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["first_head", "num_pool_heads"])
def _turn_kernel(
    pool_ptr, staging_ptr, ids_ptr,
    block_stride, span, staging_block_stride, first_head, num_pool_heads,
    HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, TAIL: tl.constexpr, TAIL_PADDED: tl.constexpr, TO_POOL: tl.constexpr,
):  # fmt: skip
    """One head of one row, element by element; even rows are keys and change their layout."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    head = tl.program_id(2)
    block = tl.load(ids_ptr + index).to(tl.int64)
    pool = pool_ptr + block * block_stride + (row * num_pool_heads + first_head + head) * span
    staging = staging_ptr + index * staging_block_stride + (row * tl.num_programs(2) + head) * span
    d = tl.arange(0, DIM_PADDED)
    for first in range(0, BLOCK_SIZE, TOKENS):
        tokens = first + tl.arange(0, TOKENS)
        mask = (tokens < BLOCK_SIZE)[:, None] & (d < HEAD_DIM)[None, :]
        if row % 2 == 0:
            _move_tile(pool, staging, tokens, d, mask, HEAD_DIM, BLOCK_SIZE, True, TO_POOL)
        else:
            _move_tile(pool, staging, tokens, d, mask, HEAD_DIM, BLOCK_SIZE, False, TO_POOL)
    if TAIL > 0:
        tail = BLOCK_SIZE * HEAD_DIM + tl.arange(0, TAIL_PADDED)
        mask = tl.arange(0, TAIL_PADDED) < TAIL
        if TO_POOL:
            tl.store(pool + tail, tl.load(staging + tail, mask=mask), mask=mask)
        else:
            tl.store(staging + tail, tl.load(pool + tail, mask=mask), mask=mask)


def staging_shape(spec: KVCacheSpec, num_blocks: int, heads: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the uint8 staging of so many blocks: a row per layer's K or V, of these heads."""
    span = spec.block_size * spec.row_bytes
    return num_blocks, spec.num_layers * 2, heads[1] - heads[0], span


def gather_blocks(
    pool: torch.Tensor,
    spec: KVCacheSpec,
    block_ids: torch.Tensor,
    heads: tuple[int, int],
    staging: torch.Tensor,
    *,
    keys_by_dim: bool = False,
) -> None:
    """Copy the heads of the blocks from the pool to the staging, in order.

    Args:
        pool: [num_blocks, block_bytes] uint8, contiguous.
        spec: The pool's geometry.
        block_ids: [N] integers.
        heads: First head and the one after the last, counted in this pool.
        staging: ``staging_shape`` uint8, contiguous, 16-byte aligned.
        keys_by_dim: The staging's keys lie as ``[D, block_size]``.
    """
    _move(pool, spec, block_ids, heads, staging, keys_by_dim, to_pool=False)


def scatter_blocks(
    staging: torch.Tensor,
    pool: torch.Tensor,
    spec: KVCacheSpec,
    block_ids: torch.Tensor,
    heads: tuple[int, int],
    *,
    keys_by_dim: bool = False,
) -> None:
    """The reverse of ``gather_blocks``; other heads of the blocks are left as they are."""
    _move(pool, spec, block_ids, heads, staging, keys_by_dim, to_pool=True)


def _move(
    pool: torch.Tensor, spec: KVCacheSpec, block_ids: torch.Tensor, heads: tuple[int, int],
    staging: torch.Tensor, keys_by_dim: bool, *, to_pool: bool,
) -> None:  # fmt: skip
    num_blocks, num_rows, num_heads, span = staging_shape(spec, len(block_ids), heads)
    assert staging.shape == (num_blocks, num_rows, num_heads, span)
    assert staging.is_contiguous()
    assert pool.is_contiguous()
    assert 0 <= heads[0] < heads[1] <= spec.num_kv_heads
    if num_blocks == 0:
        return
    if keys_by_dim:
        element = torch.empty(0, dtype=ELEMENT_DTYPES[spec.dtype]).element_size()
        pool, staging = pool.view(_STORED_AS[element]), staging.view(_STORED_AS[element])
        dim_padded = triton.next_power_of_2(spec.head_dim)
        tail = (span - spec.block_size * spec.head_dim * element) // element
        _turn_kernel[(num_blocks, num_rows, num_heads)](
            pool, staging, block_ids,
            pool.stride(0), span // element, staging.stride(0), heads[0], spec.num_kv_heads,
            HEAD_DIM=spec.head_dim, DIM_PADDED=dim_padded, BLOCK_SIZE=spec.block_size,
            TOKENS=_tile_tokens(spec.block_size, dim_padded), TAIL=tail,
            TAIL_PADDED=triton.next_power_of_2(max(1, tail)), TO_POOL=to_pool, num_warps=4,
        )  # fmt: skip
        return
    pool, staging = pool.view(torch.int32), staging.view(torch.int32)
    words = span // _WORD_BYTES
    run = num_heads * words
    _copy_kernel[(num_blocks, num_rows, triton.cdiv(run, _WORDS))](
        pool, staging, block_ids,
        pool.stride(0), spec.num_kv_heads * words, staging.stride(0), heads[0] * words, run,
        WORDS=_WORDS, TO_POOL=to_pool, num_warps=4,
    )  # fmt: skip


def _tile_tokens(block_size: int, dim_padded: int) -> int:
    return min(int(triton.next_power_of_2(block_size)), max(1, _TILE_ELEMENTS // dim_padded))


def reference(
    pool: torch.Tensor,
    spec: KVCacheSpec,
    block_ids: torch.Tensor,
    heads: tuple[int, int],
    *,
    keys_by_dim: bool = False,
) -> torch.Tensor:
    """What ``gather_blocks`` leaves in the staging."""
    span = spec.block_size * spec.row_bytes
    rows = pool.view(spec.num_blocks, spec.num_layers * 2, spec.num_kv_heads, span)
    taken = rows[block_ids.long(), :, heads[0] : heads[1]].clone()
    if keys_by_dim:
        size = span // spec.row_bytes * spec.head_dim
        size *= torch.empty(0, dtype=ELEMENT_DTYPES[spec.dtype]).element_size()
        keys = taken[:, ::2, :, :size]
        by_token = keys.reshape(*keys.shape[:3], spec.block_size, spec.head_dim, -1)
        keys.copy_(by_token.transpose(3, 4).reshape(keys.shape))
    return taken


def variants() -> list[Variant]:
    """Plain copies, and turned keys of every width, both ways."""
    pointers = {"pool_ptr": "*i32:16", "staging_ptr": "*i32:16", "ids_ptr": "*i64:16"}
    copy = {
        **pointers, "block_stride": "i32:16", "row_stride": "i32:16",
        "staging_block_stride": "i32:16", "first_word": "i32:16", "run_words": "i32:16",
    }  # fmt: skip
    found = [
        Variant(
            name=name,
            fn=_copy_kernel,
            signature=copy,
            constexprs={"WORDS": _WORDS, "TO_POOL": to_pool},
        )
        for name, to_pool in (("gather", False), ("scatter", True))
    ]
    for element, tail in (("i8", 64), ("i16", 0)):
        turn = {
            "pool_ptr": f"*{element}:16", "staging_ptr": f"*{element}:16", "ids_ptr": "*i64:16",
            "block_stride": "i32:16", "span": "i32:16", "staging_block_stride": "i32:16",
            "first_head": "i32", "num_pool_heads": "i32",
        }  # fmt: skip
        found += [
            Variant(
                name=f"{name}, keys turned, {element}",
                fn=_turn_kernel,
                signature=turn,
                constexprs={
                    "HEAD_DIM": 128, "DIM_PADDED": 128, "BLOCK_SIZE": 16, "TOKENS": 16,
                    "TAIL": tail, "TAIL_PADDED": max(1, tail), "TO_POOL": to_pool,
                },
            )
            for name, to_pool in (("gather", False), ("scatter", True))
        ]  # fmt: skip
    return found
