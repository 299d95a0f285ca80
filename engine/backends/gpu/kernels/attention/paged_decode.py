"""Attention of one query token per sequence over its paged KV cache.

The keys of a sequence are cut into splits, so that few long sequences fill the card too; a second
kernel combines the splits' results (Flash-Decoding). The query heads that share a KV head are the
rows of one program, so that every key and value is read once::

    keys      | split 0        | split 1        | … | last .. |
              | tile | tile …  | tile | tile …  |             a tile spans several blocks
    window                 [low ............... context_len)  blocks before low are not read

The splits' bounds come from ``context_lens`` on the device: one launch, and so one CUDA graph,
serves every length up to the width of the block tables. Softmax is online, in base 2.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from engine.backends.gpu.kernels.attention import varlen_prefill
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

MAX_SPLITS = 64
MIN_SPLIT_KEYS = 128
"""A split shorter than this costs more in its launch and combination than it gains."""
_PROGRAMS_PER_SM = 2
_WAVES = 2
"""Rounds of programs at least, where the context allows: lengths are ragged, and short programs
even them out."""
_COMBINED_AT_ONCE = 16
_LEAST_DOT_ROWS = 16


@triton.jit(do_not_specialize=["window", "table_stride"])
def _paged_decode_kernel(
    q_ptr, keys_ptr, values_ptr, k_scales_ptr, v_scales_ptr, tables_ptr, lens_ptr,
    out_ptr, partial_ptr, lse_ptr,
    score_scale, softcap_log2, window,
    q_seq_stride, q_head_stride, out_seq_stride, out_head_stride,
    block_stride, head_stride, scale_block_stride, scale_head_stride, table_stride,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr,
    QUANTISED: tl.constexpr, SOFTCAP: tl.constexpr, SPLIT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2)
    num_kv_heads = tl.num_programs(0)
    num_splits = tl.num_programs(1)
    ALIGN: tl.constexpr = BLOCK_SIZE if BLOCK_SIZE < BLOCK_N else BLOCK_N
    PARTS: tl.constexpr = 2 if QUANTISED else 1
    ROW: tl.constexpr = HEAD_DIM // PARTS

    context_len = tl.load(lens_ptr + sequence)
    low = 0
    if window > 0:
        low = tl.maximum(context_len - window, 0)
    first = low // ALIGN * ALIGN
    num_tiles = tl.cdiv(context_len - first, BLOCK_N)
    tiles_per_split = tl.maximum(tl.cdiv(num_tiles, num_splits), MIN_TILES)
    begin = first + split * tiles_per_split * BLOCK_N
    end = tl.minimum(begin + tiles_per_split * BLOCK_N, context_len)

    rows = tl.arange(0, GROUP_PADDED)
    d = tl.arange(0, DIM_PADDED // PARTS)
    q_mask = (rows < GROUP)[:, None] & (d < ROW)[None, :]
    heads = kv_head * GROUP + rows
    result = (sequence.to(tl.int64) * num_kv_heads * GROUP + heads) * num_splits + split
    if SPLIT and begin >= end:
        tl.store(lse_ptr + result, float("-inf"), mask=rows < GROUP)
        return

    q_ptrs = q_ptr + sequence.to(tl.int64) * q_seq_stride + heads[:, None] * q_head_stride
    q_ptrs += d[None, :] * PARTS
    q = tl.load(q_ptrs, mask=q_mask, other=0.0).to(DOT)
    q_odd = q
    if QUANTISED:
        q_odd = tl.load(q_ptrs + 1, mask=q_mask, other=0.0).to(DOT)
    table = tables_ptr + sequence.to(tl.int64) * table_stride
    keys_ptr += kv_head.to(tl.int64) * head_stride
    values_ptr += kv_head.to(tl.int64) * head_stride
    k_scales_ptr += kv_head.to(tl.int64) * scale_head_stride
    v_scales_ptr += kv_head.to(tl.int64) * scale_head_stride

    top = tl.full([GROUP_PADDED], LOWEST, tl.float32)
    # Summed over tiles here and over a tile's keys at the end: one reduction across warps less.
    totals = tl.zeros([GROUP_PADDED, BLOCK_N], tl.float32)
    acc = tl.zeros([GROUP_PADDED, DIM_PADDED // PARTS], tl.float32)
    acc_odd = acc
    n = tl.arange(0, BLOCK_N)
    factor = 1.0 if SOFTCAP else score_scale
    for start in range(begin, end, BLOCK_N):
        position = start + n
        valid = (position >= low) & (position < end)
        block = tl.load(table + position // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        offset = position % BLOCK_SIZE
        at = (block * block_stride + offset * ROW)[:, None] + d[None, :]
        mask = tile_mask(valid, d, ROW, DIM_PADDED // PARTS)
        keys = tl.load(keys_ptr + at, mask=mask, other=0)
        if QUANTISED:
            scales_at = block * scale_block_stride + offset
            k_scales = tl.load(k_scales_ptr + scales_at, mask=valid, other=0.0)
            even, odd = unpack_int8(keys, DOT)
            scores = tl.dot(q, tl.trans(even), input_precision="tf32x3")
            scores = tl.dot(q_odd, tl.trans(odd), scores, input_precision="tf32x3")
            scores *= k_scales[None, :]
        else:
            scores = tl.dot(q, tl.trans(keys.to(DOT)), input_precision="tf32x3")
        if SOFTCAP:
            scores = soft_capped(scores * score_scale, softcap_log2)
        scores = tl.where(valid[None, :], scores, float("-inf"))
        # One fused multiply-add per score, after the maximum.
        new_top = tl.maximum(top, tl.max(scores, axis=1) * factor)
        rescale = tl.exp2(top - new_top)[:, None]
        weights = tl.exp2(scores * factor - new_top[:, None])
        totals = totals * rescale + weights
        top = new_top
        values = tl.load(values_ptr + at, mask=mask, other=0)
        if QUANTISED:
            v_scales = tl.load(v_scales_ptr + scales_at, mask=valid, other=0.0)
            weights = (weights * (v_scales * V_SCALE_LIFT)[None, :]).to(DOT)
            even, odd = unpack_int8(values, DOT)
            acc = tl.dot(weights, even, acc * rescale, input_precision="tf32x3")
            acc_odd = tl.dot(weights, odd, acc_odd * rescale, input_precision="tf32x3")
        else:
            acc = tl.dot(weights.to(DOT), values.to(DOT), acc * rescale, input_precision="tf32x3")

    total = tl.sum(totals, axis=1)
    # A padding row (context_len 0) has summed nothing.
    inverse = (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    if QUANTISED:
        inverse *= 1.0 / V_SCALE_LIFT
    if SPLIT:
        tl.store(lse_ptr + result, top + tl.log2(total), mask=rows < GROUP)
        out_ptrs = partial_ptr + result[:, None] * HEAD_DIM
    else:
        out_ptrs = out_ptr + sequence.to(tl.int64) * out_seq_stride
        out_ptrs += heads[:, None] * out_head_stride
    out_ptrs += d[None, :] * PARTS
    dtype = out_ptrs.dtype.element_ty
    tl.store(out_ptrs, (acc * inverse).to(dtype), mask=q_mask)
    if QUANTISED:
        tl.store(out_ptrs + 1, (acc_odd * inverse).to(dtype), mask=q_mask)


@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(
    partial_ptr, lse_ptr, out_ptr, out_seq_stride, out_head_stride, num_splits,
    HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    first = (sequence.to(tl.int64) * tl.num_programs(0) + head) * num_splits
    d = tl.arange(0, DIM_PADDED)
    in_dim = d < HEAD_DIM
    top = tl.full([], LOWEST, tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([DIM_PADDED], tl.float32)
    for start in range(0, num_splits, AT_ONCE):
        split = start + tl.arange(0, AT_ONCE)
        lse = tl.load(lse_ptr + first + split, mask=split < num_splits, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(lse, axis=0))
        weights = tl.exp2(lse - new_top)
        rescale = tl.exp2(top - new_top)
        top = new_top
        # An empty split has written no result: what lies there may be NaN.
        written = (lse > float("-inf"))[:, None] & in_dim[None, :]
        at = (first + split)[:, None] * HEAD_DIM + d[None, :]
        parts = tl.load(partial_ptr + at, mask=written, other=0.0)
        acc = acc * rescale + tl.sum(parts * weights[:, None], axis=0)
        total = total * rescale + tl.sum(weights, axis=0)
    acc = acc / tl.where(total > 0.0, total, 1.0)
    out_ptrs = out_ptr + sequence.to(tl.int64) * out_seq_stride + head * out_head_stride + d
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_dim)


def choose_splits(batch: int, num_kv_heads: int, max_context: int, num_sms: int) -> int:
    """Splits that fill the card evenly, from what the host knows without asking the device.

    Args:
        batch: Sequences of the launch, padding rows included.
        num_kv_heads: Of this rank.
        max_context: The most keys that one of them may have; under a CUDA graph that of its bucket.
        num_sms: Streaming multiprocessors of the card.
    """
    rows = max(1, batch * num_kv_heads)
    slots = num_sms * _PROGRAMS_PER_SM
    most = max(1, min(MAX_SPLITS, max_context // MIN_SPLIT_KEYS))
    least = min(most, -(-slots * _WAVES // rows))
    # Of the counts from there to twice as many, the one whose last round is fullest.
    candidates = range(least, min(most, 2 * least) + 1)

    def fullness(splits: int) -> float:
        rounds = rows * splits / slots
        return rounds / math.ceil(rounds)

    return max(candidates, key=lambda splits: (round(fullness(splits), 2), -splits))


def workspace_size(batch: int, num_q_heads: int, head_dim: int, num_splits: int) -> int:
    """float32 elements that ``paged_decode`` needs for these."""
    return 0 if num_splits == 1 else batch * num_q_heads * num_splits * (head_dim + 1)


def paged_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    out: torch.Tensor,
    workspace: torch.Tensor,
    num_splits: int,
    config: LaunchConfig | None = None,
) -> None:
    """Write each sequence's attention to ``out``.

    Args:
        q: [B, Hq, D], rotated; rows may be strided.
        keys: [num_blocks, Hkv, block_size, D], one layer of a ``KVView``; the query token's own
            key has been written.
        values: Like ``keys``, with its strides.
        k_scales: [num_blocks, Hkv, block_size] float32 for int8, else None.
        v_scales: Like ``k_scales``, with its strides.
        block_tables: [B, max blocks] int32; entries past a sequence's context are not followed.
        context_lens: [B] int32 keys of each sequence, up to the width of the tables; 0 for a
            padding row, whose output is zero.
        scale: Of the scores; positive.
        window: The last keys that are seen; 0 is all.
        softcap: Scores become ``softcap * tanh(score / softcap)``; 0 leaves them.
        out: [B, Hq, D] of any float dtype.
        workspace: At least ``workspace_size`` float32 elements, contiguous; overwritten.
        num_splits: 1 … ``MAX_SPLITS``, as from ``choose_splits``.
        config: Instead of the tuning table's, to measure others.
    """
    batch, num_q_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = keys.shape
    size = workspace_size(batch, num_q_heads, head_dim, num_splits)
    assert 1 <= num_splits <= MAX_SPLITS
    assert size <= workspace.numel()
    assert workspace.dtype == torch.float32
    assert num_q_heads % num_kv_heads == 0
    assert scale > 0.0
    assert q.stride(2) == out.stride(2) == block_tables.stride(1) == context_lens.stride(0) == 1
    assert keys.stride() == values.stride()
    assert keys.stride()[2:] == (head_dim, 1)
    if batch == 0:
        return
    group = num_q_heads // num_kv_heads
    dim_padded = triton.next_power_of_2(head_dim)
    dot = dot_dtype_of(q.dtype, keys.dtype)
    config = config or launch_config("paged_decode", **tuning_key(dot, keys.dtype, head_dim))
    partial = workspace[: batch * num_q_heads * num_splits * head_dim]
    lse = workspace[partial.numel() :]
    if k_scales is not None:
        keys, values = as_pairs(keys), as_pairs(values)
    _paged_decode_kernel[(num_kv_heads, num_splits, batch)](
        q, keys, values,
        workspace if k_scales is None else k_scales, workspace if v_scales is None else v_scales,
        block_tables, context_lens, out, partial, lse,
        *in_base_2(scale, softcap), window,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        keys.stride(0), keys.stride(1), *scale_strides(k_scales), block_tables.stride(0),
        GROUP=group, GROUP_PADDED=max(_LEAST_DOT_ROWS, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, DIM_PADDED=dim_padded, BLOCK_SIZE=block_size,
        MIN_TILES=max(1, MIN_SPLIT_KEYS // config.meta["BLOCK_N"]),
        QUANTISED=k_scales is not None, SOFTCAP=softcap > 0.0, SPLIT=num_splits > 1, DOT=dot,
        num_warps=config.num_warps, num_stages=config.num_stages, **config.meta,
    )  # fmt: skip
    if num_splits > 1:
        _combine_kernel[(num_q_heads, batch)](
            partial, lse, out, out.stride(0), out.stride(1), num_splits,
            HEAD_DIM=head_dim, DIM_PADDED=dim_padded, AT_ONCE=_COMBINED_AT_ONCE, num_warps=4,
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
    """Attention of one sequence's query [Hq, D] over its keys and values [context, Hkv, D]."""
    return varlen_prefill.reference(
        q[None], keys, values, scale=scale, window=window, softcap=softcap
    )[0]


def variants() -> list[Variant]:
    """Every pair of dtypes that is multiplied in its own way, and every head size."""
    decode = [
        _variant("bf16", "bf16", 64, 16),
        _variant("bf16", "bf16", 128, 16),
        _variant("bf16", "bf16", 128, 16, softcap=True, split=False),
        _variant("bf16", "bf16", 256, 32),
        _variant("bf16", "i8", 128, 16),
        _variant("bf16", "i8", 256, 32),
        _variant("fp32", "fp32", 128, 16),
        _variant("fp32", "fp32", 256, 32),
        _variant("fp32", "i8", 128, 16),
    ]
    return decode + [_combine_variant(head_dim) for head_dim in (128, 256)]


def _variant(
    dtype: str, kv_dtype: str, head_dim: int, block_size: int, *, softcap: bool = False,
    split: bool = True, group: int = 4,
) -> Variant:  # fmt: skip
    quantised = kv_dtype == "i8"
    dot = dot_dtype_of(VARIANT_DTYPES[dtype], VARIANT_DTYPES[kv_dtype])
    key = tuning_key(dot, VARIANT_DTYPES[kv_dtype], head_dim)
    config = launch_config("paged_decode", **key)
    kv = "*i16:16" if quantised else f"*{kv_dtype}:16"
    scale_stride = "i32" if quantised else "i32:16"
    ends = (", capped" if softcap else "") + ("" if split else ", not split")
    return Variant(
        name=f"{dtype}, {kv_dtype} KV, head {head_dim}, block {block_size}{ends}",
        fn=_paged_decode_kernel,
        signature={
            "q_ptr": f"*{dtype}:16", "keys_ptr": kv, "values_ptr": kv, "k_scales_ptr": "*fp32:16",
            "v_scales_ptr": "*fp32:16", "tables_ptr": "*i32:16", "lens_ptr": "*i32:16",
            "out_ptr": f"*{dtype}:16", "partial_ptr": "*fp32:16", "lse_ptr": "*fp32:16",
            "score_scale": "fp32", "softcap_log2": "fp32", "window": "i32",
            "q_seq_stride": "i32:16", "q_head_stride": "i32:16",
            "out_seq_stride": "i32:16", "out_head_stride": "i32:16",
            "block_stride": "i32:16", "head_stride": "i32:16",
            "scale_block_stride": scale_stride, "scale_head_stride": scale_stride,
            "table_stride": "i32",
        },
        constexprs={
            "GROUP": group, "GROUP_PADDED": _LEAST_DOT_ROWS, "HEAD_DIM": head_dim,
            "DIM_PADDED": head_dim, "BLOCK_SIZE": block_size,
            "MIN_TILES": max(1, MIN_SPLIT_KEYS // config.meta["BLOCK_N"]),
            "QUANTISED": quantised, "SOFTCAP": softcap, "SPLIT": split, "DOT": dot,
            **config.meta,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip


def _combine_variant(head_dim: int) -> Variant:
    return Variant(
        name=f"combine, head {head_dim}",
        fn=_combine_kernel,
        signature={
            "partial_ptr": "*fp32:16", "lse_ptr": "*fp32:16", "out_ptr": "*bf16:16",
            "out_seq_stride": "i32:16", "out_head_stride": "i32:16", "num_splits": "i32",
        },
        constexprs={
            "HEAD_DIM": head_dim, "DIM_PADDED": head_dim, "AT_ONCE": _COMBINED_AT_ONCE,
        },
    )  # fmt: skip
