"""``x @ w.T`` with packed integer weights (``packed_weights``) and 16-bit or float32 activations.

The tile is computed transposed, ``[BLOCK_N, BLOCK_M]``: the weights, dequantised in registers, are
the left operand, which tensor cores take from there, and activations come from shared memory. So
few tokens cost few columns instead of a padded tile of rows, and one kernel serves every m.

With few tokens the tiles of N are too few to fill the card, and K is split: each program stores a
partial sum and counts itself; the last one to arrive at a tile adds the partial sums in the order
of K, so that the result does not depend on who was last, and sets the count back to zero.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from engine.backends.gpu.kernels.linear.packed_weights import WORDS, dequantise, unit_of
from engine.backends.gpu.kernels.linear.tile_order import grouped_tile
from engine.backends.gpu.tuning import LaunchConfig
from engine.backends.gpu.variant import Variant

_MIN_UNITS = 4  # of K for one program: less is mostly the pipeline's start
_MAX_SPLITS = 16
TRITON_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
"""Of activations, as signatures and tuning tables name them."""


@dataclass(slots=True, frozen=True)
class SplitWorkspace:
    """Where partial sums wait. One launch at a time may use it: it belongs to one stream."""

    partials: torch.Tensor
    """[elements] float32."""
    arrivals: torch.Tensor
    """[tiles] int32, zero between launches."""

    @classmethod
    def allocate(
        cls, device: torch.device, *, elements: int = 4 << 20, tiles: int = 4096
    ) -> SplitWorkspace:
        """A workspace that serves every launch: one that needs more splits K less."""
        return cls(
            torch.empty(elements, dtype=torch.float32, device=device),
            torch.zeros(tiles, dtype=torch.int32, device=device),
        )


@triton.jit
def _part_scales(
    scales_ptrs,
    N,
    left,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Scales of one part of a unit, of which ``left`` K values are wanted; else zeros."""
    if PART < PARTS:
        wanted = tl.full([BLOCK_N], PART * SPAN, tl.int32) < left
        return tl.load(scales_ptrs + PART * N, mask=wanted, other=0.0)
    else:
        return tl.zeros([BLOCK_N], dtype=scales_ptrs.dtype.element_ty)


# One binary for every m: a launch that compiles stalls the requests being served.
@triton.jit(do_not_specialize=["M", "units_per_split"])
def packed_matmul_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    partials_ptr,
    arrivals_ptr,
    M,
    N,
    K,
    units_per_split,
    stride_xm,
    stride_om,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_GROUP: tl.constexpr,
):
    """``out[m, n] = sum_k x[m, k] * w[n, k] * scale + bias[n]``; grid (tiles, splits).

    GROUP: K values that share a row of scales ``[K / GROUP, N]``; 0: one scale per output.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    UNIT: tl.constexpr = 512 // BITS
    SPAN: tl.constexpr = GROUP if GROUP > 0 else UNIT  # K of one dot
    PLANES: tl.constexpr = SPAN // 32
    PARTS: tl.constexpr = UNIT // SPAN
    tile = tl.program_id(0)
    split = tl.program_id(1)
    tile_m, tile_n = grouped_tile(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), TILE_GROUP)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1)
    k = tl.arange(0, SPAN)
    in_m = m[None, :] < M
    first = split * units_per_split
    last = tl.minimum(first + units_per_split, tl.cdiv(K, UNIT))
    words_ptrs = words_ptr + first.to(tl.int64) * N * 16
    words_ptrs += rows[:, None] * 16 + tl.arange(0, 16)[None, :]
    x_ptrs = x_ptr + first * UNIT + m.to(tl.int64)[None, :] * stride_xm + k[:, None]
    scales_ptrs = scales_ptr + rows
    end = tl.minimum(last * UNIT, K)
    if GROUP == 0:
        scale0 = tl.load(scales_ptrs).to(tl.float32)
        scale1, scale2, scale3 = scale0, scale0, scale0
    else:
        # A load that no dot takes is not pipelined, so each unit's scales are loaded one ahead.
        scales_ptrs += first.to(tl.int64) * PARTS * N
        scale0 = _part_scales(scales_ptrs, N, end - first * UNIT, 0, PARTS, SPAN, BLOCK_N)
        scale1 = _part_scales(scales_ptrs, N, end - first * UNIT, 1, PARTS, SPAN, BLOCK_N)
        scale2 = _part_scales(scales_ptrs, N, end - first * UNIT, 2, PARTS, SPAN, BLOCK_N)
        scale3 = _part_scales(scales_ptrs, N, end - first * UNIT, 3, PARTS, SPAN, BLOCK_N)
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for unit in range(first, last):
        words = tl.load(words_ptrs)
        now0, now1, now2, now3 = scale0, scale1, scale2, scale3
        if GROUP > 0:
            scales_ptrs += PARTS * N
            left = end - (unit + 1) * UNIT
            scale0 = _part_scales(scales_ptrs, N, left, 0, PARTS, SPAN, BLOCK_N)
            scale1 = _part_scales(scales_ptrs, N, left, 1, PARTS, SPAN, BLOCK_N)
            scale2 = _part_scales(scales_ptrs, N, left, 2, PARTS, SPAN, BLOCK_N)
            scale3 = _part_scales(scales_ptrs, N, left, 3, PARTS, SPAN, BLOCK_N)
        for part in tl.static_range(PARTS):
            if EVEN_K:
                x = tl.load(x_ptrs + part * SPAN, mask=in_m, other=0.0)
            else:
                in_x = in_m & (k[:, None] < K - unit * UNIT - part * SPAN)
                x = tl.load(x_ptrs + part * SPAN, mask=in_x, other=0.0)
            w = dequantise(words, part * PLANES, PLANES, BITS, BLOCK_N, DTYPE)
            if part == 0:
                scale = now0
            elif part == 1:
                scale = now1
            elif part == 2:
                scale = now2
            else:
                scale = now3
            # Scaled here even where one scale would do in the end: a sum in the tensor cores'
            # accumulator from one turn to the next makes each of their instructions wait.
            acc += tl.dot(w, x, input_precision="ieee") * scale.to(tl.float32)[:, None]
        words_ptrs += N * 16
        x_ptrs += UNIT
    valid = in_m & (n[:, None] < N)
    if SPLIT:
        num_splits = tl.num_programs(1)
        if num_splits > 1:
            partial_ptrs = partials_ptr + m[None, :] * N + n[:, None]
            tl.store(partial_ptrs + split * M * N, acc, mask=valid)
            tl.debug_barrier()  # the whole block's stores come before its count
            arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel")
            valid = valid & ((tl.zeros_like(n) + arrived)[:, None] == num_splits - 1)
            acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            for _ in tl.range(0, num_splits, loop_unroll_factor=4):
                acc += tl.load(partial_ptrs, mask=valid, other=0.0, cache_modifier=".cg")
                partial_ptrs += M * N
            tl.store(arrivals_ptr + tile, 0, mask=arrived == num_splits - 1)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    out_ptrs = out_ptr + m.to(tl.int64)[None, :] * stride_om + n[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=valid)


def packed_matmul(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    bits: int,
    group: int,
    out: torch.Tensor,
    workspace: SplitWorkspace | None,
    config: LaunchConfig,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Launch the kernel.

    Args:
        x: [M, K], unit stride in K.
        words: [ceil(K / unit), N, 16] int32.
        scales: [N], or [K / group, N] if ``group`` is not 0.
        bias: [N] or None.
        bits: 4 or 8.
        group: K values per scale; 0: all.
        out: [M, N], unit stride in N.
        workspace: lets K be split; without it the result is the same to rounding, later.
        config: meta has BLOCK_M, BLOCK_N, TILE_GROUP and, to split K, PROGRAMS_PER_SM.
        num_splits: instead of what the card calls for (tests).
    """
    num_tokens, size = x.shape
    num_units, num_outputs, num_words = words.shape
    assert num_words == WORDS
    assert num_units == -(-size // unit_of(bits))
    assert out.shape == (num_tokens, num_outputs)
    assert x.stride(1) == 1
    assert out.stride(1) == 1
    assert words.is_contiguous()
    assert scales.is_contiguous()
    if num_tokens == 0:
        return out
    meta = config.meta
    tiles = triton.cdiv(num_tokens, meta["BLOCK_M"]) * triton.cdiv(num_outputs, meta["BLOCK_N"])
    units_per_split = num_units
    splits_allowed = workspace is not None and "PROGRAMS_PER_SM" in meta
    if splits_allowed:
        assert workspace is not None
        wanted = num_splits or _wanted_splits(x.device, tiles, num_units, meta["PROGRAMS_PER_SM"])
        fitting = workspace.partials.numel() // (num_tokens * num_outputs)
        if tiles <= workspace.arrivals.numel() and fitting > 1:
            units_per_split = triton.cdiv(num_units, max(1, min(wanted, fitting, num_units)))
    grid = (tiles, triton.cdiv(num_units, units_per_split))
    packed_matmul_kernel[grid](
        x,
        words,
        scales,
        scales if bias is None else bias,
        out,
        scales if workspace is None else workspace.partials,
        words if workspace is None else workspace.arrivals,
        num_tokens,
        num_outputs,
        size,
        units_per_split,
        x.stride(0),
        out.stride(0),
        BITS=bits,
        GROUP=group,
        EVEN_K=size % unit_of(bits) == 0,
        HAS_BIAS=bias is not None,
        SPLIT=splits_allowed,
        BLOCK_M=meta["BLOCK_M"],
        BLOCK_N=meta["BLOCK_N"],
        TILE_GROUP=meta["TILE_GROUP"],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def packed_variant(
    name: str, *, dtype: torch.dtype, bits: int, group: int, config: LaunchConfig
) -> Variant:
    """A launch with whole units of K and aligned rows."""
    element = TRITON_TYPES[dtype]
    meta = config.meta
    constexprs: dict[str, Any] = {
        "BITS": bits,
        "GROUP": group,
        "EVEN_K": True,
        "HAS_BIAS": False,
        "SPLIT": "PROGRAMS_PER_SM" in meta,
        "BLOCK_M": meta["BLOCK_M"],
        "BLOCK_N": meta["BLOCK_N"],
        "TILE_GROUP": meta["TILE_GROUP"],
    }
    return Variant(
        name=name,
        fn=packed_matmul_kernel,
        signature={
            "x_ptr": f"*{element}:16",
            "words_ptr": "*i32:16",
            "scales_ptr": "*fp16:16" if group else "*fp32:16",
            "bias_ptr": "*fp32:16",
            "out_ptr": f"*{element}:16",
            "partials_ptr": "*fp32:16",
            "arrivals_ptr": "*i32:16",
            "M": "i32",
            "N": "i32:16",
            "K": "i32:16",
            "units_per_split": "i32",
            "stride_xm": "i32:16",
            "stride_om": "i32:16",
        },
        constexprs=constexprs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _wanted_splits(device: torch.device, tiles: int, num_units: int, per_sm: int) -> int:
    """Enough programs for every multiprocessor, each with work worth its start."""
    if device.type != "cuda":
        return 1
    programs = _num_multiprocessors(device) * per_sm
    return max(1, min(programs // tiles, num_units // _MIN_UNITS, _MAX_SPLITS))


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
