"""Causal attention of ragged chunks of tokens over their sequences' paged KV caches.

The chunk's own keys and values have been written to the cache before, behind those of the cached
prefix. A program takes a tile of rows: some tokens of one sequence times the query heads that share
a KV head, so that chunks of a few tokens fill it too, and every key is read once for all of them::

    keys     | before the window | partly seen | seen by all rows | partly seen | not yet |
    tiles      skipped             masked        no mask            masked        skipped

Tiles are found from ``query_starts`` on the device, so nothing waits for the host. Softmax is
online, in base 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.backends.gpu.kernels.attention.paged_tile import (
    LOWEST,
    V_SCALE_LIFT,
    VARIANT_DTYPES,
    as_pairs,
    dot_dtype_of,
    in_base_2,
    scale_strides,
    soft_capped,
    tile_mask,
    tuning_key,
    unpack_int8,
)
from engine.backends.gpu.tuning import LaunchConfig, launch_config
from engine.backends.gpu.variant import Variant

_MOST_ROWS = 128


@triton.jit
def _sequence_of_tile(starts_ptr, num_sequences, tile, TOKENS: tl.constexpr):
    """The sequence whose first tile, ``starts[s] // TOKENS + s``, is the last not after this."""
    low = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _attend(
    q, q_odd, acc, acc_odd, top, total, begin, end, low, last_key, row_position, window,
    table, keys_ptr, values_ptr, k_scales_ptr, v_scales_ptr,
    block_stride, scale_block_stride, score_scale, softcap_log2,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    QUANTISED: tl.constexpr, SOFTCAP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Take the keys of ``begin`` … ``end`` into the rows' online softmax."""
    PARTS: tl.constexpr = 2 if QUANTISED else 1
    ROW: tl.constexpr = HEAD_DIM // PARTS
    ROW_PADDED: tl.constexpr = DIM_PADDED // PARTS
    d = tl.arange(0, ROW_PADDED)
    n = tl.arange(0, BLOCK_N)
    factor = 1.0 if SOFTCAP else score_scale
    for start in range(begin, end, BLOCK_N):
        position = start + n
        stored = position >= 0
        if MASKED:
            stored = (position >= low) & (position <= last_key)
            block = tl.load(table + position // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
        else:
            block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        offset = position % BLOCK_SIZE
        at = (block * block_stride + offset * ROW)[:, None] + d[None, :]
        mask = tile_mask(stored, d, ROW, ROW_PADDED)
        if MASKED or ROW != ROW_PADDED:
            keys = tl.load(keys_ptr + at, mask=mask, other=0)
        else:
            keys = tl.load(keys_ptr + at)
        if QUANTISED:
            scales_at = block * scale_block_stride + offset
            k_scales = tl.load(k_scales_ptr + scales_at, mask=stored, other=0.0)
            even, odd = unpack_int8(keys, DOT)
            scores = tl.dot(q, tl.trans(even), input_precision="tf32x3")
            scores = tl.dot(q_odd, tl.trans(odd), scores, input_precision="tf32x3")
            scores *= k_scales[None, :]
        else:
            scores = tl.dot(q, tl.trans(keys.to(DOT)), input_precision="tf32x3")
        if SOFTCAP:
            scores = soft_capped(scores * score_scale, softcap_log2)
        if MASKED:
            distance = row_position[:, None] - position[None, :]
            seen = distance >= 0
            if WINDOWED:
                seen = seen & (distance < window)
            scores = tl.where(seen, scores, float("-inf"))
        # One fused multiply-add per score, after the maximum.
        new_top = tl.maximum(top, tl.max(scores, axis=1) * factor)
        rescale = tl.exp2(top - new_top)
        weights = tl.exp2(scores * factor - new_top[:, None])
        total = total * rescale + tl.sum(weights, axis=1)
        top = new_top
        if MASKED or ROW != ROW_PADDED:
            values = tl.load(values_ptr + at, mask=mask, other=0)
        else:
            values = tl.load(values_ptr + at)
        acc = acc * rescale[:, None]
        if QUANTISED:
            v_scales = tl.load(v_scales_ptr + scales_at, mask=stored, other=0.0)
            weights = (weights * (v_scales * V_SCALE_LIFT)[None, :]).to(DOT)
            even, odd = unpack_int8(values, DOT)
            acc = tl.dot(weights, even, acc, input_precision="tf32x3")
            acc_odd = acc_odd * rescale[:, None]
            acc_odd = tl.dot(weights, odd, acc_odd, input_precision="tf32x3")
        else:
            acc = tl.dot(weights.to(DOT), values.to(DOT), acc, input_precision="tf32x3")
    return acc, acc_odd, top, total


@triton.jit(do_not_specialize=["num_sequences", "window", "table_stride"])
def _varlen_prefill_kernel(
    q_ptr, keys_ptr, values_ptr, k_scales_ptr, v_scales_ptr, starts_ptr, lens_ptr, tables_ptr,
    out_ptr, num_sequences, score_scale, softcap_log2, window,
    q_token_stride, q_head_stride, out_token_stride, out_head_stride,
    block_stride, head_stride, scale_block_stride, scale_head_stride, table_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    QUANTISED: tl.constexpr, SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    PARTS: tl.constexpr = 2 if QUANTISED else 1
    ROW: tl.constexpr = HEAD_DIM // PARTS
    ROW_PADDED: tl.constexpr = DIM_PADDED // PARTS
    kv_head = tl.program_id(0)
    # A chunk's last tiles see the most keys: they start first, the short ones fill the gaps.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence = _sequence_of_tile(starts_ptr, num_sequences, tile, TOKENS)
    start = tl.load(starts_ptr + sequence)
    num_tokens = tl.load(starts_ptr + sequence + 1) - start
    first_token = (tile - start // TOKENS - sequence) * TOKENS
    if first_token >= num_tokens:
        return
    first_position = tl.load(lens_ptr + sequence) - num_tokens + first_token
    last_position = first_position + tl.minimum(TOKENS, num_tokens - first_token) - 1

    rows = tl.arange(0, BLOCK_M)
    token = first_token + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    d = tl.arange(0, ROW_PADDED)
    in_tile = (rows < TOKENS * GROUP) & (token < num_tokens)
    mask = in_tile[:, None] & (d < ROW)[None, :]
    token_row = (start + token).to(tl.int64)
    q_ptrs = q_ptr + (token_row * q_token_stride + heads * q_head_stride)[:, None]
    q_ptrs += d[None, :] * PARTS
    q = tl.load(q_ptrs, mask=mask, other=0.0).to(DOT)
    q_odd = q
    if QUANTISED:
        q_odd = tl.load(q_ptrs + 1, mask=mask, other=0.0).to(DOT)

    low = 0
    all_from = 0
    if WINDOWED:
        low = tl.maximum(first_position - window + 1, 0)
        all_from = tl.cdiv(tl.maximum(last_position - window + 1, 0), BLOCK_N) * BLOCK_N
    all_to = (first_position + 1) // BLOCK_N * BLOCK_N
    row_position = first_position - first_token + token
    table = tables_ptr + sequence.to(tl.int64) * table_stride
    keys_ptr += kv_head.to(tl.int64) * head_stride
    values_ptr += kv_head.to(tl.int64) * head_stride
    k_scales_ptr += kv_head.to(tl.int64) * scale_head_stride
    v_scales_ptr += kv_head.to(tl.int64) * scale_head_stride

    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, ROW_PADDED], tl.float32)
    acc_odd = acc
    for phase in tl.static_range(0 if WINDOWED else 1, 3):
        if phase == 0:
            begin = low // BLOCK_N * BLOCK_N
            end = tl.minimum(all_from, last_position + 1)
        elif phase == 1:
            begin = all_from
            end = all_to
        else:
            begin = tl.maximum(all_from, all_to)
            end = last_position + 1
        acc, acc_odd, top, total = _attend(
            q, q_odd, acc, acc_odd, top, total, begin, end, low, last_position, row_position,
            window, table, keys_ptr, values_ptr, k_scales_ptr, v_scales_ptr,
            block_stride, scale_block_stride, score_scale, softcap_log2,
            phase != 1, WINDOWED, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, BLOCK_N,
            QUANTISED, SOFTCAP, DOT,
        )  # fmt: skip

    inverse = (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    if QUANTISED:
        inverse *= 1.0 / V_SCALE_LIFT
    out_ptrs = out_ptr + (token_row * out_token_stride + heads * out_head_stride)[:, None]
    out_ptrs += d[None, :] * PARTS
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptrs, (acc * inverse).to(dtype), mask=mask)
    if QUANTISED:
        tl.store(out_ptrs + 1, (acc_odd * inverse).to(dtype), mask=mask)


def varlen_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    max_query_len: int,
    out: torch.Tensor,
    config: LaunchConfig | None = None,
) -> None:
    """Write every token's attention to ``out``.

    Args:
        q: [T, Hq, D], rotated; rows may be strided.
        keys: [num_blocks, Hkv, block_size, D], one layer of a ``KVView``; the chunks' own keys
            have been written.
        values: Like ``keys``, with its strides.
        k_scales: [num_blocks, Hkv, block_size] float32 for int8, else None.
        v_scales: Like ``k_scales``, with its strides.
        query_starts: [B + 1] int32 first row of each chunk; rows from the last on are not written.
        context_lens: [B] int32 keys that a chunk's last token sees: cached before, and the chunk.
        block_tables: [B, max blocks] int32; entries past a sequence's context are not followed.
        scale: Of the scores; positive.
        window: The last keys that a token sees, its own included; 0 is all.
        softcap: Scores become ``softcap * tanh(score / softcap)``; 0 leaves them.
        max_query_len: Of the chunks, or more; only speed depends on it.
        out: [T, Hq, D] of any float dtype.
        config: Instead of the tuning table's, to measure others.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = keys.shape
    num_sequences = context_lens.shape[0]
    group = num_q_heads // num_kv_heads
    assert num_q_heads % num_kv_heads == 0
    assert scale > 0.0
    assert group <= _MOST_ROWS
    assert q.stride(2) == out.stride(2) == block_tables.stride(1) == 1
    assert query_starts.stride(0) == context_lens.stride(0) == 1
    assert keys.stride() == values.stride()
    assert keys.stride()[2:] == (head_dim, 1)
    if num_tokens == 0 or num_sequences == 0:
        return
    dim_padded = triton.next_power_of_2(head_dim)
    dot = dot_dtype_of(q.dtype, keys.dtype)
    rows = min(triton.next_power_of_2(max_query_len * group), _MOST_ROWS)
    plain = int(window == 0 and softcap == 0.0)
    key = tuning_key(dot, keys.dtype, head_dim)
    config = config or launch_config("varlen_prefill", rows=rows, plain=plain, **key)
    tokens_per_tile = config.meta["BLOCK_M"] // group
    assert tokens_per_tile > 0
    if k_scales is not None:
        keys, values = as_pairs(keys), as_pairs(values)
    # Every chunk ends in at most one tile that is not full.
    num_tiles = num_tokens // tokens_per_tile + num_sequences
    _varlen_prefill_kernel[(num_kv_heads, num_tiles)](
        q, keys, values,
        q if k_scales is None else k_scales, q if v_scales is None else v_scales,
        query_starts, context_lens, block_tables, out, num_sequences,
        *in_base_2(scale, softcap), window,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        keys.stride(0), keys.stride(1), *scale_strides(k_scales), block_tables.stride(0),
        GROUP=group, HEAD_DIM=head_dim, DIM_PADDED=dim_padded, BLOCK_SIZE=block_size,
        QUANTISED=k_scales is not None, SOFTCAP=softcap > 0.0, WINDOWED=window > 0, DOT=dot,
        num_warps=config.num_warps, num_stages=config.num_stages, **config.meta,
    )  # fmt: skip


def reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Attention of one chunk's queries [tokens, Hq, D] over all its keys [context, Hkv, D]."""
    num_tokens, num_q_heads, _ = q.shape
    context_len, num_kv_heads, _ = keys.shape
    group = num_q_heads // num_kv_heads
    wide = [part.repeat_interleave(group, dim=1) for part in (keys, values)]
    scores = torch.einsum("thd,nhd->htn", q, wide[0]) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(context_len - num_tokens, context_len, device=q.device)
    distance = position[:, None] - torch.arange(context_len, device=q.device)[None, :]
    hidden = distance < 0
    if window:
        hidden |= distance >= window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("htn,nhd->thd", weights, wide[1])


def variants() -> list[Variant]:
    """Every pair of dtypes that is multiplied in its own way, and every head and tile size."""
    return [
        _variant("bf16", "bf16", 64, 128),
        _variant("bf16", "bf16", 128, 128),
        _variant("bf16", "bf16", 128, 128, capped=True, windowed=True),
        _variant("bf16", "bf16", 128, 16),
        _variant("bf16", "bf16", 128, 64),
        _variant("bf16", "bf16", 256, 128),
        _variant("bf16", "bf16", 256, 128, capped=True, windowed=True),
        _variant("bf16", "i8", 128, 128),
        _variant("bf16", "i8", 256, 128),
        _variant("fp32", "fp32", 128, 128),
        _variant("fp32", "fp32", 256, 128),
    ]


def _variant(
    dtype: str,
    kv_dtype: str,
    head_dim: int,
    rows: int,
    *,
    capped: bool = False,
    windowed: bool = False,
) -> Variant:
    quantised = kv_dtype == "i8"
    dot = dot_dtype_of(VARIANT_DTYPES[dtype], VARIANT_DTYPES[kv_dtype])
    plain = int(not capped and not windowed)
    key = tuning_key(dot, VARIANT_DTYPES[kv_dtype], head_dim)
    config = launch_config("varlen_prefill", rows=rows, plain=plain, **key)
    kv = "*i16:16" if quantised else f"*{kv_dtype}:16"
    scale_stride = "i32" if quantised else "i32:16"
    ends = (", capped" if capped else "") + (", window" if windowed else "")
    return Variant(
        name=f"{dtype}, {kv_dtype} KV, head {head_dim}, rows {rows}{ends}",
        fn=_varlen_prefill_kernel,
        signature={
            "q_ptr": f"*{dtype}:16", "keys_ptr": kv, "values_ptr": kv, "k_scales_ptr": "*fp32:16",
            "v_scales_ptr": "*fp32:16", "starts_ptr": "*i32:16", "lens_ptr": "*i32:16",
            "tables_ptr": "*i32:16", "out_ptr": f"*{dtype}:16", "num_sequences": "i32",
            "score_scale": "fp32", "softcap_log2": "fp32", "window": "i32",
            "q_token_stride": "i32:16", "q_head_stride": "i32:16",
            "out_token_stride": "i32:16", "out_head_stride": "i32:16",
            "block_stride": "i32:16", "head_stride": "i32:16",
            "scale_block_stride": scale_stride, "scale_head_stride": scale_stride,
            "table_stride": "i32",
        },
        constexprs={
            "GROUP": 4, "HEAD_DIM": head_dim, "DIM_PADDED": head_dim, "BLOCK_SIZE": 16,
            "QUANTISED": quantised, "SOFTCAP": capped, "WINDOWED": windowed,
            "DOT": dot, **config.meta,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
