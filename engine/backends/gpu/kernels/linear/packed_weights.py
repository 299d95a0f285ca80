"""Integer weights in 32-bit words, and how a kernel turns a word into floats.

A word holds 8 int4 or 4 int8 values (two's complement) of one output row. Words lie as
``[K / UNIT, N, 16]`` int32, so that a kernel's tile of rows is one contiguous span for a *unit* of
K: 128 int4 values or 64 int8 values, 64 bytes a row either way. Within a unit, word ``r`` holds the
values of K positions ``32 j + 2 r + h``, plane j at bits ``BITS * j + 16 h``::

    int4   bits  0..3   4..7   8..11  12..15 | 16..19  20..23  24..27  28..31
           k     2r     32+2r  64+2r  96+2r  | 2r+1    33+2r   65+2r   97+2r

One shift and one mask so give two neighbours in K in the two halves of a word, where they become a
pair of 16-bit floats without a conversion: or-ing the bits into the mantissa of a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WORDS = 16
"""Words of one row in a unit."""


def unit_of(bits: int) -> int:
    """K values in a unit."""
    return WORDS * 32 // bits


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """``[N, K]`` int8 values that fit ``bits`` (4 or 8) → ``[ceil(K / unit), N, 16]`` int32.

    Positions past K hold zeros.

    Raises:
        ValueError: A value does not fit.
    """
    assert bits in (4, 8)
    assert values.dtype == torch.int8
    limit = 1 << (bits - 1)
    if values.numel() and (int(values.max()) >= limit or int(values.min()) < -limit):
        raise ValueError(f"values do not fit {bits} bits")
    num_rows, size = values.shape
    unit = unit_of(bits)
    num_units = -(-size // unit)
    padded = torch.nn.functional.pad(values, (0, num_units * unit - size))
    # [N, units, plane, word, half] → [units, N, word, half, plane]
    planes = padded.view(num_rows, num_units, unit // 32, WORDS, 2).permute(1, 0, 3, 4, 2)
    words = torch.zeros(num_units, num_rows, WORDS, dtype=torch.int64, device=values.device)
    for plane in range(unit // 32):
        for half in range(2):
            field = planes[..., half, plane].to(torch.int64) & (2 * limit - 1)
            words |= field << (bits * plane + 16 * half)
    return words.to(torch.int32)  # wraps: the highest bit becomes the sign


def unpack(words: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """Inverse of ``pack``: ``[N, size]`` int8."""
    num_rows = words.shape[1]
    planes = unit_of(bits) // 32
    shifts = torch.tensor(
        [[bits * plane + 16 * half for half in range(2)] for plane in range(planes)],
        device=words.device,
    )
    fields = words.to(torch.int64)[:, :, None, :, None] >> shifts[None, None, :, None, :]
    limit = 1 << (bits - 1)
    values = ((fields + limit) & (2 * limit - 1)) - limit
    return values.permute(1, 0, 2, 3, 4).reshape(num_rows, -1)[:, :size].to(torch.int8)


@triton.jit
def _pairs_of_plane(words, PLANE: tl.constexpr, BITS: tl.constexpr):
    """Two values in the low bits of the halves; whatever is above them is not cleared."""
    return words >> (BITS * PLANE)


@triton.jit
def _pairs(
    words, FIRST: tl.constexpr, PLANES: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr
):
    """``[ROWS, 16]`` words → ``[ROWS, 16 * PLANES]`` pairs in the order of K."""
    if PLANES == 1:
        return _pairs_of_plane(words, FIRST, BITS)
    elif PLANES == 2:
        both = tl.join(_pairs_of_plane(words, FIRST, BITS), _pairs_of_plane(words, FIRST + 1, BITS))
        return both.permute(0, 2, 1).reshape(ROWS, 32)
    else:
        even = tl.join(_pairs_of_plane(words, FIRST, BITS), _pairs_of_plane(words, FIRST + 2, BITS))
        odd = tl.join(
            _pairs_of_plane(words, FIRST + 1, BITS), _pairs_of_plane(words, FIRST + 3, BITS)
        )
        return tl.join(even, odd).permute(0, 2, 3, 1).reshape(ROWS, 64)


@triton.jit
def _halves(pairs, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    """Words → their two halves as 16-bit floats, side by side; no instruction in machine code."""
    low = (pairs & 0xFFFF).to(tl.int16)
    high = (pairs >> 16).to(tl.int16)
    return tl.join(low, high).reshape(ROWS, COLUMNS).to(DTYPE, bitcast=True)


@triton.jit
def dequantise(
    words,
    FIRST: tl.constexpr,
    PLANES: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Planes FIRST .. FIRST + PLANES of a unit's words: ``[ROWS, 16]`` → ``[ROWS, 32 * PLANES]``.

    Exact: a bfloat16's mantissa (7 bits) takes an int4 as ``128 + 8 + q``, and the lower 7 bits of
    an int8, whose sign bit makes the 128 to be taken off again a 256; a float16's (10 bits) takes
    either whole.
    """
    pairs = _pairs(words, FIRST, PLANES, BITS, ROWS)
    COLUMNS: tl.constexpr = PLANES * 32
    if DTYPE == tl.float32:
        low = (pairs << (32 - BITS)) >> (32 - BITS)
        high = (pairs << (16 - BITS)) >> (32 - BITS)
        return tl.join(low, high).reshape(ROWS, COLUMNS).to(tl.float32)
    elif BITS == 4:
        if DTYPE == tl.bfloat16:
            biased = _halves((pairs & 0x000F000F) ^ 0x43084308, ROWS, COLUMNS, DTYPE)
            return biased - tl.full([], 136.0, DTYPE)
        else:
            biased = _halves((pairs & 0x000F000F) ^ 0x64086408, ROWS, COLUMNS, DTYPE)
            return biased - tl.full([], 1032.0, DTYPE)
    else:
        if DTYPE == tl.bfloat16:
            magnitude = _halves((pairs & 0x007F007F) | 0x43004300, ROWS, COLUMNS, DTYPE)
            offset = _halves((pairs & 0x00800080) | 0x43004300, ROWS, COLUMNS, DTYPE)
            return magnitude - offset
        else:
            biased = _halves((pairs & 0x00FF00FF) ^ 0x64806480, ROWS, COLUMNS, DTYPE)
            return biased - tl.full([], 1152.0, DTYPE)
