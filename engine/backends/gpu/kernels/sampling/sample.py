"""Temperature, top-k, top-p, min-p and one draw per row, without sorting the vocabulary.

What is kept is what ``engine.sampler`` keeps: every token whose weight ``exp((logit - max) / T)``
is not below the k-th largest, then not below the smallest of the fewest largest that hold
``top_p`` of what is left, then not below ``min_p`` times the largest. One uniform number then
inverts the cumulative weights in the order of the vocabulary::

    maxima → passes for top-k → passes for top-p → masses of the chunks → draw

(``sample_search`` has the first three.) 16-bit logits take 4 passes for each search, float32 logits
8. Rows that need no search leave its kernels at once; a batch that needs none is not given them
(``use_top_k``, ``use_top_p``). Rows with temperature 0 take the first largest logit; ``greedy``
launches only what that needs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.backends.gpu.kernels.sampling.sample_search import (
    find_maxima,
    key_bits,
    keys_of,
    maxima_kernel,
    row_maximum,
    search,
    search_kernel,
    settled,
    weights_of,
)
from engine.backends.gpu.kernels.sampling.sample_workspace import CHUNK, MAX_CHUNKS, SampleWorkspace
from engine.backends.gpu.tuning import launch_config
from engine.backends.gpu.variant import Variant


@triton.jit(do_not_specialize=["num_rows", "num_k_passes", "num_p_passes"])
def masses_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    maxima_ptr,
    k_lows_ptr,
    k_partials_ptr,
    p_lows_ptr,
    p_partials_ptr,
    targets_ptr,
    thresholds_ptr,
    masses_ptr,
    vocabulary,
    num_rows,
    num_chunks,
    stride_logits,
    num_k_passes,
    num_p_passes,
    BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Each row's threshold, and what each chunk keeps of its weights; grid (rows, chunks)."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature == 0.0:
        return
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    threshold = tl.full([], -(1 << (BITS - 1)), tl.int32)
    if (num_k_passes > 0) & (top_k > 0):
        threshold, _ = settled(
            k_lows_ptr, targets_ptr, k_partials_ptr, row, num_rows, num_chunks,
            num_k_passes, top_k, False, BITS, CHUNKS,
        )  # fmt: skip
    if (num_p_passes > 0) & (top_p < 1.0):
        threshold, _ = settled(
            p_lows_ptr, targets_ptr, p_partials_ptr, row, num_rows, num_chunks,
            num_p_passes, top_p, True, BITS, CHUNKS,
        )  # fmt: skip
    if chunk == 0:
        tl.store(thresholds_ptr + row, threshold)
    largest = row_maximum(maxima_ptr, row, num_chunks, CHUNKS)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    logits_ptrs = logits_ptr + row.to(tl.int64) * stride_logits + tokens
    logits = tl.load(logits_ptrs, mask=tokens < vocabulary, other=float("-inf"))
    weights = weights_of(logits, largest, temperature)
    kept = (keys_of(logits, BITS) >= threshold) & (weights >= tl.load(min_p_ptr + row))
    mass = tl.sum(tl.where(kept, weights, 0.0), axis=0)
    tl.store(masses_ptr + row * num_chunks + chunk, mass)


@triton.jit
def _first_largest(maxima_ptr, first_maxima_ptr, row, largest, num_chunks, CHUNKS: tl.constexpr):
    """The token of the first chunk that has the row's largest logit."""
    chunks = tl.arange(0, CHUNKS)
    in_row = chunks < num_chunks
    maxima = tl.load(maxima_ptr + row * num_chunks + chunks, mask=in_row, other=float("-inf"))
    chunk = tl.min(tl.where((maxima == largest) & in_row, chunks, num_chunks - 1), axis=0)
    return tl.load(first_maxima_ptr + row * num_chunks + chunk)


@triton.jit
def greedy_kernel(maxima_ptr, first_maxima_ptr, out_ptr, num_chunks, CHUNKS: tl.constexpr):
    """The first largest logit; grid (rows)."""
    row = tl.program_id(0)
    largest = row_maximum(maxima_ptr, row, num_chunks, CHUNKS)
    token = _first_largest(maxima_ptr, first_maxima_ptr, row, largest, num_chunks, CHUNKS)
    tl.store(out_ptr + row, token.to(out_ptr.dtype.element_ty))


@triton.jit
def draw_kernel(
    logits_ptr,
    temperature_ptr,
    min_p_ptr,
    uniforms_ptr,
    maxima_ptr,
    first_maxima_ptr,
    thresholds_ptr,
    masses_ptr,
    out_ptr,
    vocabulary,
    num_chunks,
    stride_logits,
    BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The chunk where the cumulative weights pass the number, then the token in it; grid (rows)."""
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    largest = row_maximum(maxima_ptr, row, num_chunks, CHUNKS)
    if temperature == 0.0:
        token = _first_largest(maxima_ptr, first_maxima_ptr, row, largest, num_chunks, CHUNKS)
    else:
        chunks = tl.arange(0, CHUNKS)
        masses_ptrs = masses_ptr + row * num_chunks + chunks
        masses = tl.load(masses_ptrs, mask=chunks < num_chunks, other=0.0)
        ends = tl.cumsum(masses, axis=0)
        aim = tl.load(uniforms_ptr + row) * tl.max(ends, axis=0)
        # Rounding may leave the aim at the end of all: then the last chunk, and token, with weight.
        last = tl.max(tl.where(masses > 0.0, chunks, 0), axis=0)
        chunk = tl.min(tl.where((ends > aim) & (chunks < last), chunks, last), axis=0)
        before = tl.max(tl.where(chunks < chunk, ends, 0.0), axis=0)
        offsets = tl.arange(0, CHUNK)
        tokens = chunk * CHUNK + offsets
        logits_ptrs = logits_ptr + row.to(tl.int64) * stride_logits + tokens
        logits = tl.load(logits_ptrs, mask=tokens < vocabulary, other=float("-inf"))
        weights = weights_of(logits, largest, temperature)
        threshold = tl.load(thresholds_ptr + row)
        kept = (keys_of(logits, BITS) >= threshold) & (weights >= tl.load(min_p_ptr + row))
        weights = tl.where(kept, weights, 0.0)
        last_offset = tl.max(tl.where(weights > 0.0, offsets, 0), axis=0)
        passed = (tl.cumsum(weights, axis=0) > aim - before) & (weights > 0.0)
        token = chunk * CHUNK + tl.min(tl.where(passed, offsets, last_offset), axis=0)
    tl.store(out_ptr + row, token.to(out_ptr.dtype.element_ty))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    out: torch.Tensor,
    workspace: SampleWorkspace,
    use_top_k: bool = True,
    use_top_p: bool = True,
) -> torch.Tensor:
    """Draw one token per row.

    Args:
        logits: [N, V], float32, bfloat16 or float16, unit stride in V.
        temperature: [N] float32; 0: the first largest logit.
        top_k: [N] int32; 0: all.
        top_p: [N] float32; 1: all.
        min_p: [N] float32; 0: all.
        uniforms: [N] float32 in [0, 1).
        out: [N] int32 or int64.
        workspace: of at least N rows and this vocabulary.
        use_top_k: whether any row may have a top_k; False leaves the search out.
        use_top_p: likewise for top_p.
    """
    num_rows, vocabulary, num_chunks = _checked(logits, out, workspace)
    if num_rows == 0:
        return out
    find_maxima(logits, workspace)
    num_k_passes = num_p_passes = 0
    settings = (temperature, top_k, top_p, workspace)
    if use_top_k:
        num_k_passes = search(logits, *settings, mass=False, num_floor_passes=0)
    if use_top_p:
        num_p_passes = search(logits, *settings, mass=True, num_floor_passes=num_k_passes)
    k_lows, p_lows = workspace.lows
    k_partials, p_partials = workspace.partials
    config = launch_config("sample_chunk")
    masses_kernel[(num_rows, num_chunks)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        workspace.maxima,
        k_lows,
        k_partials,
        p_lows,
        p_partials,
        workspace.targets,
        workspace.thresholds,
        workspace.masses,
        vocabulary,
        num_rows,
        num_chunks,
        logits.stride(0),
        num_k_passes,
        num_p_passes,
        BITS=key_bits(logits),
        CHUNK=workspace.chunk,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    config = launch_config("sample_draw")
    draw_kernel[(num_rows,)](
        logits,
        temperature,
        min_p,
        uniforms,
        workspace.maxima,
        workspace.first_maxima,
        workspace.thresholds,
        workspace.masses,
        out,
        vocabulary,
        num_chunks,
        logits.stride(0),
        BITS=key_bits(logits),
        CHUNK=workspace.chunk,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def greedy(logits: torch.Tensor, *, out: torch.Tensor, workspace: SampleWorkspace) -> torch.Tensor:
    """The first largest logit of every row; arguments as those of ``sample``."""
    num_rows, _, num_chunks = _checked(logits, out, workspace)
    if num_rows == 0:
        return out
    find_maxima(logits, workspace)
    greedy_kernel[(num_rows,)](
        workspace.maxima,
        workspace.first_maxima,
        out,
        num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=1,
        num_stages=1,
    )
    return out


def reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Weight of every token that may be drawn, [N, V] float64, by sorting; 0 for the others."""
    kept = torch.zeros(logits.shape, dtype=torch.float64)
    for row, values in enumerate(logits.to(torch.float64)):
        if temperature[row] == 0:
            kept[row, int(values.argmax())] = 1.0
            continue
        weights = ((values - values.max()) / temperature[row].to(torch.float64)).exp()
        if 0 < top_k[row] < len(weights):
            weights[weights < weights.sort(descending=True).values[int(top_k[row]) - 1]] = 0.0
        if top_p[row] < 1:
            ordered = weights.sort(descending=True).values
            sums = ordered.cumsum(0)
            enough = torch.searchsorted(sums, sums[-1] * top_p[row].to(torch.float64))
            weights[weights < ordered[min(int(enough), len(ordered) - 1)]] = 0.0
        weights[weights < min_p[row]] = 0.0
        kept[row] = weights
    return kept


def _checked(
    logits: torch.Tensor, out: torch.Tensor, workspace: SampleWorkspace
) -> tuple[int, int, int]:
    """(rows, vocabulary, chunks)."""
    num_rows, vocabulary = logits.shape
    num_chunks = triton.cdiv(vocabulary, workspace.chunk)
    assert logits.stride(1) == 1
    assert out.shape == (num_rows,)
    assert num_rows <= len(workspace.targets)
    assert num_chunks <= workspace.maxima.shape[1]
    return num_rows, vocabulary, num_chunks


def variants() -> list[Variant]:
    """Every kernel for both widths of keys, at the largest vocabulary."""
    greedy_types = dict.fromkeys(("maxima_ptr", "first_maxima_ptr"), "*fp32:16")
    greedy_types |= {"out_ptr": "*i64:16", "num_chunks": "i32"}
    first = Variant(
        name="greedy",
        fn=greedy_kernel,
        signature=greedy_types,
        constexprs={"CHUNKS": MAX_CHUNKS},
        num_warps=1,
        num_stages=1,
    )
    return [first] + [
        variant
        for element, bits in (("fp32", 32), ("bf16", 16))
        for variant in _variants_of(element, bits)
    ]


def _variants_of(element: str, bits: int) -> list[Variant]:
    floats = "maxima temperature top_p min_p uniforms targets masses"
    floats += " partials floor_partials k_partials p_partials"
    types = {"logits_ptr": f"*{element}:16", "out_ptr": "*i64:16", "stride_logits": "i32:16"}
    types |= {f"{name}_ptr": "*fp32:16" for name in floats.split()}
    chunk, draw = launch_config("sample_chunk"), launch_config("sample_draw")
    find = launch_config("sample_search")
    sizes = {"CHUNK": CHUNK, "CHUNKS": MAX_CHUNKS}
    cases = [
        ("maxima", maxima_kernel, chunk, {"CHUNK": CHUNK}),
        ("top-k", search_kernel, find, {"MASS": False, "BITS": bits, **sizes, **find.meta}),
        ("top-p", search_kernel, find, {"MASS": True, "BITS": bits, **sizes, **find.meta}),
        ("masses", masses_kernel, chunk, {"BITS": bits, **sizes}),
        ("draw", draw_kernel, draw, {"BITS": bits, **sizes}),
    ]
    return [
        Variant(
            name=f"{name}, {element} logits",
            fn=kernel,
            signature={
                argument: types.get(argument, "*i32:16" if argument.endswith("_ptr") else "i32")
                for argument in kernel.arg_names
                if argument not in constexprs
            },
            constexprs=constexprs,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        for name, kernel, config, constexprs in cases
    ]
