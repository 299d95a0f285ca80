"""Rotary embedding of q and k, their norms, and the write of k and v to the cache: one pass.

A program takes one token and up to ``HEADS`` query heads, or as many KV heads with both k and v::

    qkv row   | q heads ............... | k heads .... | v heads .... |
    programs    [HEADS] [HEADS] … [HEADS]  [k and v of HEADS heads] …

Arithmetic is float32, and the cache takes k before it is rounded to the activation dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.backends.gpu.variant import Variant

_NEAREST = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding and subtracting it rounds a float32 below 2^22 to the nearest integer."""


@triton.jit
def _norm_and_rotate(
    low, high, weight_ptr, eps, cos, sin, d, in_half,
    NORM: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """RMS norm of [heads, D] given as its two halves, then the rotation."""
    HALF: tl.constexpr = HEAD_DIM // 2
    if NORM:
        total = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        factor = tl.rsqrt(total / HEAD_DIM + eps)[:, None]
        low = low * factor * tl.load(weight_ptr + d, mask=in_half, other=0.0)[None, :]
        high = high * factor * tl.load(weight_ptr + HALF + d, mask=in_half, other=0.0)[None, :]
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _store_rows(
    low, high, row_ptrs, scale_ptrs, d, head_mask, mask,
    QUANTISED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Write [heads, D] rows to the cache; int8 rows get a scale of their own."""
    ptrs = row_ptrs[:, None] + d[None, :]
    if QUANTISED:
        largest = tl.maximum(tl.max(tl.abs(low), axis=1), tl.max(tl.abs(high), axis=1))
        tl.store(scale_ptrs, largest * (1.0 / 127.0), mask=head_mask)
        inverse = (127.0 / tl.maximum(largest, 1e-30))[:, None]
        low = (low * inverse + _NEAREST) - _NEAREST
        high = (high * inverse + _NEAREST) - _NEAREST
    dtype = row_ptrs.dtype.element_ty
    tl.store(ptrs, low.to(dtype), mask=mask)
    tl.store(ptrs + HALF, high.to(dtype), mask=mask)


@triton.jit
def _rope_kv_write_kernel(
    qkv_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps,
    keys_ptr, values_ptr, k_scales_ptr, v_scales_ptr,
    qkv_stride, rope_stride, block_stride, head_stride, scale_block_stride, scale_head_stride,
    NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr,
    NORM: tl.constexpr, QUANTISED: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0)
    part = tl.program_id(1)
    d = tl.arange(0, HALF_PADDED)
    in_half = d < HALF
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * rope_stride + d, mask=in_half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * rope_stride + d, mask=in_half, other=0.0)[None, :]
    row = qkv_ptr + token.to(tl.int64) * qkv_stride
    num_q_parts: tl.constexpr = (NUM_Q_HEADS + HEADS - 1) // HEADS
    if part < num_q_parts:
        heads = part * HEADS + tl.arange(0, HEADS)
        mask = (heads < NUM_Q_HEADS)[:, None] & in_half[None, :]
        ptrs = row + heads[:, None] * HEAD_DIM + d[None, :]
        low = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
        low, high = _norm_and_rotate(
            low, high, q_norm_ptr, eps, cos, sin, d, in_half, NORM, HEAD_DIM
        )
        tl.store(ptrs, low.to(qkv_ptr.dtype.element_ty), mask=mask)
        tl.store(ptrs + HALF, high.to(qkv_ptr.dtype.element_ty), mask=mask)
    else:
        heads = (part - num_q_parts) * HEADS + tl.arange(0, HEADS)
        head_mask = heads < NUM_KV_HEADS
        mask = head_mask[:, None] & in_half[None, :]
        ptrs = row + (NUM_Q_HEADS + heads)[:, None] * HEAD_DIM + d[None, :]
        v_ptrs = ptrs + NUM_KV_HEADS * HEAD_DIM
        low = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
        v_low = tl.load(v_ptrs, mask=mask, other=0.0).to(tl.float32)
        v_high = tl.load(v_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
        low, high = _norm_and_rotate(
            low, high, k_norm_ptr, eps, cos, sin, d, in_half, NORM, HEAD_DIM
        )
        tl.store(ptrs, low.to(qkv_ptr.dtype.element_ty), mask=mask)
        tl.store(ptrs + HALF, high.to(qkv_ptr.dtype.element_ty), mask=mask)
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            block = slot // BLOCK_SIZE
            offset = slot % BLOCK_SIZE
            rows = block * block_stride + heads.to(tl.int64) * head_stride + offset * HEAD_DIM
            scales = block * scale_block_stride + heads.to(tl.int64) * scale_head_stride + offset
            _store_rows(
                low, high, keys_ptr + rows, k_scales_ptr + scales, d, head_mask, mask,
                QUANTISED, HALF,
            )  # fmt: skip
            _store_rows(
                v_low, v_high, values_ptr + rows, v_scales_ptr + scales, d, head_mask, mask,
                QUANTISED, HALF,
            )  # fmt: skip


_HEADS = 8


def rope_kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    num_q_heads: int,
) -> None:
    """Norm (if given) and rotate q and k in place; store k and v of every token in its slot.

    Args:
        qkv: [T, (Hq + 2 Hkv) * D], q heads first; rows may be strided.
        positions: [T] integers, within the rope tables.
        slot_mapping: [T] integers, ``block * block_size + offset``; -1 stores nothing.
        cos: [max positions, D / 2] float32; element i is rotated with i + D / 2.
        sin: Like ``cos``.
        q_norm: [D] float32 weights of q's RMS norm per head; None for neither norm.
        k_norm: [D] float32 weights of k's.
        eps: Of the norms.
        keys: [num_blocks, Hkv, block_size, D], one layer of a ``KVView``.
        values: Like ``keys``, with its strides.
        k_scales: [num_blocks, Hkv, block_size] float32 for int8, else None.
        v_scales: Like ``k_scales``, with its strides.
        num_q_heads: Hq.
    """
    num_tokens = qkv.shape[0]
    if num_tokens == 0:
        return
    _, num_kv_heads, block_size, head_dim = keys.shape
    assert qkv.shape[1] == (num_q_heads + 2 * num_kv_heads) * head_dim
    assert qkv.stride(1) == 1
    assert keys.stride() == values.stride()
    assert keys.stride()[2:] == (head_dim, 1)
    assert cos.stride() == sin.stride()
    assert cos.stride(1) == 1
    assert (q_norm is None) == (k_norm is None)
    quantised = k_scales is not None
    num_parts = triton.cdiv(num_q_heads, _HEADS) + triton.cdiv(num_kv_heads, _HEADS)
    _rope_kv_write_kernel[(num_tokens, num_parts)](
        qkv, positions, slot_mapping, cos, sin,
        cos if q_norm is None else q_norm, cos if k_norm is None else k_norm, eps,
        keys, values, cos if k_scales is None else k_scales, cos if v_scales is None else v_scales,
        qkv.stride(0), cos.stride(0), keys.stride(0), keys.stride(1),
        k_scales.stride(0) if k_scales is not None else 0,
        k_scales.stride(1) if k_scales is not None else 0,
        NUM_Q_HEADS=num_q_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        HALF_PADDED=triton.next_power_of_2(head_dim // 2), BLOCK_SIZE=block_size, HEADS=_HEADS,
        NORM=q_norm is not None, QUANTISED=quantised, num_warps=4,
    )  # fmt: skip


def reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    num_q_heads: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """The whole rows afterwards, [T, Hq + 2 Hkv, D]; slots take the k and v of these."""
    num_heads = num_q_heads + 2 * num_kv_heads
    heads = qkv.reshape(len(qkv), num_heads, qkv.shape[1] // num_heads).clone()
    cos, sin = (table[positions.long()][:, None] for table in (cos, sin))
    for first, count, weight in (
        (0, num_q_heads, q_norm),
        (num_q_heads, num_kv_heads, k_norm),
    ):
        part = heads[:, first : first + count]
        if weight is not None:
            part = part * (part.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
        low, high = part.chunk(2, dim=-1)
        rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
        heads[:, first : first + count] = rotated
    return heads


def variants() -> list[Variant]:
    """Every pair of dtypes and every common head size, with norms where models have them."""
    return [
        _variant("bf16", "bf16", 64, 16, norm=False),
        _variant("bf16", "bf16", 128, 16, norm=False),
        _variant("bf16", "bf16", 128, 16, norm=True),
        _variant("bf16", "bf16", 256, 32, norm=True),
        _variant("bf16", "i8", 128, 16, norm=True),
        _variant("fp16", "fp16", 128, 16, norm=True),
        _variant("fp32", "fp32", 128, 16, norm=True),
        _variant("fp32", "i8", 128, 16, norm=True),
    ]


def _variant(dtype: str, kv_dtype: str, head_dim: int, block_size: int, *, norm: bool) -> Variant:
    kv = f"*{kv_dtype}:16"
    quantised = kv_dtype == "i8"
    scale_stride = "i32" if quantised else "i32:16"
    return Variant(
        name=f"{dtype}, {kv_dtype} KV, head {head_dim}, block {block_size}"
        + (", norms" if norm else ""),
        fn=_rope_kv_write_kernel,
        signature={
            "qkv_ptr": f"*{dtype}:16", "positions_ptr": "*i32:16", "slots_ptr": "*i64:16",
            "cos_ptr": "*fp32:16", "sin_ptr": "*fp32:16",
            "q_norm_ptr": "*fp32:16", "k_norm_ptr": "*fp32:16", "eps": "fp32",
            "keys_ptr": kv, "values_ptr": kv,
            "k_scales_ptr": "*fp32:16", "v_scales_ptr": "*fp32:16",
            "qkv_stride": "i32:16", "rope_stride": "i32:16",
            "block_stride": "i32:16", "head_stride": "i32:16",
            "scale_block_stride": scale_stride, "scale_head_stride": scale_stride,
        },
        constexprs={
            "NUM_Q_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": head_dim,
            "HALF_PADDED": head_dim // 2, "BLOCK_SIZE": block_size, "HEADS": _HEADS,
            "NORM": norm, "QUANTISED": quantised,
        },
    )  # fmt: skip
