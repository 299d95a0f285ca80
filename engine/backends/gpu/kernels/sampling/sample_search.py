"""Finds the smallest logit that top-k or top-p keeps, by search over the bits of the logits.

The order of floats is that of integers made from their bits. A row is split over CHUNKs, a program
each; every pass takes 16 thresholds that divide the interval left, 4 bits, and each program stores
its count (top-k) or sum of weights (top-p) of the tokens at or above each. The next kernel adds
them up, always in the same order, so that nothing varies between runs, and goes on with the part
of the interval that holds the last threshold to reach what is wanted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.backends.gpu.kernels.sampling.sample_workspace import SampleWorkspace
from engine.backends.gpu.tuning import launch_config


@triton.jit
def keys_of(logits, BITS: tl.constexpr):
    """int32 in the order of the logits; -0 and 0 are one."""
    values = tl.where(logits.to(tl.float32) == 0.0, 0.0, logits.to(tl.float32))
    if BITS == 16:
        bits = values.to(logits.dtype).to(tl.int16, bitcast=True).to(tl.int32)
        return bits ^ ((bits >> 31) & 0x7FFF)
    else:
        bits = values.to(tl.int32, bitcast=True)
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def weights_of(logits, largest, temperature):
    inverse = tl.minimum(1.4426950408889634 / temperature, 1e30)  # 0 * inf would not be 0
    return tl.exp2((logits.to(tl.float32) - largest) * inverse)


@triton.jit
def row_maximum(maxima_ptr, row, num_chunks, CHUNKS: tl.constexpr):
    chunks = tl.arange(0, CHUNKS)
    inside = chunks < num_chunks
    maxima = tl.load(maxima_ptr + row * num_chunks + chunks, mask=inside, other=float("-inf"))
    return tl.max(maxima, axis=0)


@triton.jit
def settled(
    lows_ptr,
    targets_ptr,
    partials_ptr,
    row,
    num_rows,
    num_chunks,
    num_passes,
    limit,
    MASS: tl.constexpr,
    BITS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """After ``num_passes`` passes: the interval's lower end, and what a threshold must reach.

    The lower end reaches it, or is the least key of all.
    """
    low = tl.full([], -(1 << (BITS - 1)), tl.int32)
    target = limit.to(tl.float32)
    if num_passes > 0:
        chunks = tl.arange(0, CHUNKS)[:, None]
        step = tl.arange(0, 16)
        first = ((num_passes - 1) % 2 * num_rows + row) * num_chunks
        partials = tl.load(
            partials_ptr + (first + chunks) * 16 + step[None, :],
            mask=chunks + step[None, :] * 0 < num_chunks,
            other=0.0,
        )
        totals = tl.sum(partials, axis=0)
        if MASS:
            if num_passes == 1:
                target *= tl.sum(tl.where(step == 0, totals, 0.0), axis=0)
            else:
                target = tl.load(targets_ptr + row)
        reached = (step > 0) & (totals >= target)
        num_reached = tl.sum(reached.to(tl.int32), axis=0)
        low = tl.load(lows_ptr + (num_passes - 1) * num_rows + row)
        low += num_reached << (BITS - 4 * num_passes)
    return low, target


@triton.jit
def maxima_kernel(
    logits_ptr,
    maxima_ptr,
    first_maxima_ptr,
    vocabulary,
    num_chunks,
    stride_logits,
    CHUNK: tl.constexpr,
):
    """The largest logit of each chunk and the first token that has it; grid (rows, chunks)."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    logits_ptrs = logits_ptr + row.to(tl.int64) * stride_logits + tokens
    logits = tl.load(logits_ptrs, mask=tokens < vocabulary, other=float("-inf")).to(tl.float32)
    largest, first = tl.max(logits, axis=0, return_indices=True)
    tl.store(maxima_ptr + row * num_chunks + chunk, largest)
    tl.store(first_maxima_ptr + row * num_chunks + chunk, chunk * CHUNK + first)


@triton.jit(do_not_specialize=["pass_index", "num_rows", "num_floor_passes"])
def search_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    maxima_ptr,
    lows_ptr,
    targets_ptr,
    partials_ptr,
    floor_lows_ptr,
    floor_partials_ptr,
    vocabulary,
    num_rows,
    num_chunks,
    stride_logits,
    pass_index,
    num_floor_passes,
    MASS: tl.constexpr,
    BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One pass of the search for top-k (counts) or top-p (MASS); grid (rows, chunks).

    ``floor_*`` and ``num_floor_passes``: of the search for top-k, which top-p starts from.
    """
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    floor = tl.full([], -(1 << (BITS - 1)), tl.int32)
    if MASS:
        limit = tl.load(top_p_ptr + row)
        if (limit >= 1.0) | (temperature == 0.0):
            return
        if (num_floor_passes > 0) & (top_k > 0):
            floor, _ = settled(
                floor_lows_ptr, targets_ptr, floor_partials_ptr, row, num_rows, num_chunks,
                num_floor_passes, top_k, False, BITS, CHUNKS,
            )  # fmt: skip
    else:
        limit = top_k
        if (limit <= 0) | (temperature == 0.0):
            return
    low, target = settled(
        lows_ptr, targets_ptr, partials_ptr, row, num_rows, num_chunks,
        pass_index, limit, MASS, BITS, CHUNKS,
    )  # fmt: skip
    if chunk == 0:
        tl.store(lows_ptr + pass_index * num_rows + row, low)
        if MASS:
            tl.store(targets_ptr + row, target)
    largest = row_maximum(maxima_ptr, row, num_chunks, CHUNKS)
    thresholds = low + (tl.arange(0, 16) << (BITS - 4 * (pass_index + 1)))
    sums = tl.zeros([BLOCK, 16], dtype=tl.float32)
    logits_ptr += row.to(tl.int64) * stride_logits
    for start in range(0, CHUNK, BLOCK):
        tokens = chunk * CHUNK + start + tl.arange(0, BLOCK)
        inside = tokens < vocabulary
        logits = tl.load(logits_ptr + tokens, mask=inside, other=float("-inf"))
        keys = keys_of(logits, BITS)
        if MASS:
            values = tl.where(keys >= floor, weights_of(logits, largest, temperature), 0.0)
        else:
            values = inside.to(tl.float32)
        sums += tl.where(keys[:, None] >= thresholds[None, :], values[:, None], 0.0)
    partials_ptr += ((pass_index % 2 * num_rows + row) * num_chunks + chunk) * 16
    tl.store(partials_ptr + tl.arange(0, 16), tl.sum(sums, axis=0))


def key_bits(logits: torch.Tensor) -> int:
    """Bits of the logits' type, which are searched 4 in a pass."""
    return 32 if logits.dtype == torch.float32 else 16


def find_maxima(logits: torch.Tensor, workspace: SampleWorkspace) -> None:
    """Fill ``maxima`` and ``first_maxima``."""
    num_rows, vocabulary = logits.shape
    num_chunks = triton.cdiv(vocabulary, workspace.chunk)
    config = launch_config("sample_chunk")
    maxima_kernel[(num_rows, num_chunks)](
        logits,
        workspace.maxima,
        workspace.first_maxima,
        vocabulary,
        num_chunks,
        logits.stride(0),
        CHUNK=workspace.chunk,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def search(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    workspace: SampleWorkspace,
    *,
    mass: bool,
    num_floor_passes: int,
) -> int:
    """Launch all passes for top-k, or for top-p (``mass``) after them; returns their number.

    Args:
        logits: [N, V], whose maxima have been found.
        temperature: [N] float32.
        top_k: [N] int32.
        top_p: [N] float32.
        workspace: ``lows`` and ``partials`` take the result, for ``settled``.
        mass: whether for top-p.
        num_floor_passes: what the search for top-k returned, 0 without one.
    """
    num_rows, vocabulary = logits.shape
    num_chunks = triton.cdiv(vocabulary, workspace.chunk)
    bits = key_bits(logits)
    k_lows, p_lows = workspace.lows
    k_partials, p_partials = workspace.partials
    config = launch_config("sample_search")
    for pass_index in range(bits // 4):
        search_kernel[(num_rows, num_chunks)](
            logits,
            temperature,
            top_k,
            top_p,
            workspace.maxima,
            p_lows if mass else k_lows,
            workspace.targets,
            p_partials if mass else k_partials,
            k_lows,
            k_partials,
            vocabulary,
            num_rows,
            num_chunks,
            logits.stride(0),
            pass_index,
            num_floor_passes,
            MASS=mass,
            BITS=bits,
            CHUNK=workspace.chunk,
            CHUNKS=triton.next_power_of_2(num_chunks),
            BLOCK=min(config.meta["BLOCK"], workspace.chunk),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return bits // 4
