"""Rotary position embedding parameters and the inverse frequencies they stand for."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import torch

RopeScaling = Literal["none", "linear", "llama3", "yarn", "factors"]


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """RoPE over the whole head, rotated by halves: pairs are ``(i, i + head_dim / 2)``."""

    theta: float
    """Base of the geometric frequency series."""
    scaling: RopeScaling = "none"
    """How the frequencies are stretched; ``factors`` divides each one by ``freq_factors``."""
    factor: float = 1.0
    """Context stretch of ``linear``, ``llama3`` and ``yarn``."""
    original_max_position_embeddings: int = 0
    """Context length before stretching, in tokens (``llama3`` and ``yarn``)."""
    low_freq_factor: float = 1.0
    """``llama3``: wavelengths above original context / this are divided by ``factor``."""
    high_freq_factor: float = 4.0
    """``llama3``: wavelengths below original context / this are kept."""
    beta_fast: float = 32.0
    """``yarn``: rotations over the original context above which a frequency is kept."""
    beta_slow: float = 1.0
    """``yarn``: rotations over the original context below which it is divided by ``factor``."""
    truncate: bool = True
    """``yarn``: round the bounds of the ramp to whole dimensions."""
    attention_factor: float = 1.0
    """Multiplier of cos and sin (``yarn``; 1 elsewhere)."""
    freq_factors: tuple[float, ...] = ()
    """``factors``: one divisor per frequency, head_dim / 2 of them (GGUF ``rope_freqs``)."""
    local_theta: float | None = None
    """Base of the unscaled series that sliding-window layers use; None: same as the others."""


def rope_inv_freq(
    rope: RopeConfig, head_dim: int, *, local: bool = False
) -> tuple[torch.Tensor, float]:
    """Return inverse frequencies and the factor to multiply cos and sin with.

    Same formulas and float32 order of operations as ``ROPE_INIT_FUNCTIONS`` of transformers
    (``modeling_rope_utils.py``); YaRN is section 3 of https://arxiv.org/abs/2309.00071.

    Args:
        rope: The parameters.
        head_dim: Width of a head; every dimension is rotated.
        local: True for a sliding-window layer, which may have its own unscaled base.

    Returns:
        ``inv_freq`` as float32 ``[head_dim / 2]``, and the attention factor.
    """
    assert head_dim % 2 == 0
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    if local and rope.local_theta is not None:
        return 1.0 / (rope.local_theta**exponent), 1.0
    pos_freqs = rope.theta**exponent
    inv_freq = 1.0 / pos_freqs
    match rope.scaling:
        case "none":
            return inv_freq, 1.0
        case "linear":
            return inv_freq / rope.factor, 1.0
        case "factors":
            factors = torch.tensor(rope.freq_factors, dtype=torch.float32)
            assert factors.shape == inv_freq.shape
            return inv_freq / factors, 1.0
        case "llama3":
            return _llama3(rope, inv_freq), 1.0
        case "yarn":
            return _yarn(rope, pos_freqs, head_dim), rope.attention_factor


def yarn_mscale(scale: float, mscale: float = 1.0) -> float:
    """YaRN's temperature for a context stretched ``scale`` times."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _llama3(rope: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    # wavelength:   0 ······ high bound ············ low bound ······ inf
    # frequency:      kept       |   interpolated       |    / factor
    context = rope.original_max_position_embeddings
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelen = 2 * math.pi / inv_freq
    scaled = torch.where(wavelen > context / low, inv_freq / rope.factor, inv_freq)
    smooth = (context / wavelen - low) / (high - low)
    smoothed = (1 - smooth) * scaled / rope.factor + smooth * scaled
    is_between = ~(wavelen < context / high) * ~(wavelen > context / low)
    return torch.where(is_between, smoothed, scaled)


def _yarn(rope: RopeConfig, pos_freqs: torch.Tensor, head_dim: int) -> torch.Tensor:
    low = _rotations_dim(rope, rope.beta_fast, head_dim)
    high = _rotations_dim(rope, rope.beta_slow, head_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # no division by zero: the ramp becomes a step
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1 - torch.clamp(ramp, 0, 1)
    return 1.0 / (rope.factor * pos_freqs) * (1 - keep) + 1.0 / pos_freqs * keep


def _rotations_dim(rope: RopeConfig, num_rotations: float, head_dim: int) -> float:
    """Dimension whose frequency turns ``num_rotations`` times over the original context."""
    context = rope.original_max_position_embeddings
    return (head_dim * math.log(context / (num_rotations * 2 * math.pi))) / (
        2 * math.log(rope.theta)
    )
