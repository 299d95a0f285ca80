"""What the kernels that read tiles of the paged cache share.

int8 rows are read as pairs, an int16 for elements 2 i and 2 i + 1: a matrix operand of 16-bit
elements is loaded from shared memory in whole vectors, transposed where it must be, which one of
8 bits is not; its two halves are then multiplied apart, even and odd elements of D.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from engine.backends.gpu.tuning import Key

LOWEST = tl.constexpr(-1.0e30)
"""Below every score, yet finite: differences of two are 0, never NaN."""

V_SCALE_LIFT = tl.constexpr(256.0)
"""Keeps a weight times a value's scale in the normal range of float16."""

_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
VARIANT_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "i8": torch.int8,
}
"""By the names in kernel signatures."""
_NAMES = {tl.float32: "fp32", tl.bfloat16: "bf16", tl.float16: "fp16"}


@triton.jit
def tile_mask(valid, d, ROW: tl.constexpr, ROW_PADDED: tl.constexpr):
    """[rows, ROW_PADDED] mask of valid rows; d counts only where it is padded."""
    mask = valid[:, None]
    if ROW != ROW_PADDED:
        mask = mask & (d < ROW)[None, :]
    return mask


@triton.jit
def unpack_int8(pairs, DOT: tl.constexpr):
    """The two int8 of every int16, exactly.

    A byte b with its sign flipped is the mantissa of the float16 1024 + 128 + b.
    """
    low = ((pairs & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
    high = (((pairs >> 8) & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
    return low.to(DOT), high.to(DOT)


@triton.jit
def soft_capped(scores, softcap_log2):
    """``softcap * tanh(x)`` in base 2 for scores that hold 2 log2(e) x."""
    return softcap_log2 * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))


def as_pairs(rows: torch.Tensor) -> torch.Tensor:
    """int8 [..., D] as int16 [..., D / 2]."""
    return rows.view(torch.int16)


def dot_dtype_of(activation: torch.dtype, stored: torch.dtype) -> tl.dtype:
    """What queries, keys and values are multiplied in, with float32 sums.

    float32 where the activations are; else what the cache holds, as converting the cache costs
    more than converting queries. int8 is exact in float16, and unpacked to it in fewest steps.
    """
    if activation == torch.float32:
        return tl.float32
    return tl.float16 if stored == torch.int8 else _TRITON_DTYPES[stored]


def tuning_key(dot: tl.dtype, stored: torch.dtype, head_dim: int) -> dict[str, Key]:
    """What the tuning tables go by: the cache's dtype, what it is multiplied in, the padded D."""
    kv = "int8" if stored == torch.int8 else _NAMES[_TRITON_DTYPES[stored]]
    return {"kv": kv, "dot": _NAMES[dot], "head_dim": triton.next_power_of_2(head_dim)}


def in_base_2(scale: float, softcap: float) -> tuple[float, float]:
    """What scores are multiplied by for ``exp2`` (``soft_capped``, with a cap), and that cap."""
    log2e = math.log2(math.e)
    return scale * log2e * (2.0 / softcap if softcap else 1.0), softcap * log2e


def scale_strides(scales: torch.Tensor | None) -> tuple[int, int]:
    """Of int8's scales, by block and head."""
    return (0, 0) if scales is None else (scales.stride(0), scales.stride(1))
