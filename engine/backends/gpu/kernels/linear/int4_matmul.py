"""W4A16: 16-bit (or float32) activations times group-wise symmetric int4 weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.backends.gpu.kernels.linear.packed_matmul import (
    TRITON_TYPES,
    SplitWorkspace,
    packed_matmul,
    packed_variant,
)
from engine.backends.gpu.kernels.linear.packed_tuning import packed_tuning_cases
from engine.backends.gpu.kernels.linear.packed_weights import pack, unpack
from engine.backends.gpu.tuning import launch_config
from engine.backends.gpu.tuning_case import TuningCase
from engine.backends.gpu.variant import Variant

BITS = 4
GROUPS = (32, 64, 128)
_LARGEST = 7  # symmetric: -8 is left unused


def quantise(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[N, K]`` floats → values ``[N, K]`` int8 in -7 .. 7 and scales ``[K / group, N]`` float16.

    Rounds to the scales as stored, so that their own rounding costs nothing more.

    Raises:
        ValueError: K is not whole groups, or a scale is past float16.
    """
    num_outputs, size = weight.shape
    if group not in GROUPS or size % group:
        raise ValueError(f"rows of {size} are not whole groups of {group}, one of {GROUPS}")
    groups = weight.to(torch.float32).view(num_outputs, size // group, group)
    scales = (groups.abs().amax(dim=2) / _LARGEST).to(torch.float16)
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("weights are too large for float16 scales, or not finite")
    steps = scales.to(torch.float32)[:, :, None]
    values = torch.where(steps > 0, groups / steps, 0.0).round().clamp(-_LARGEST, _LARGEST)
    return values.to(torch.int8).view(num_outputs, size), scales.T.contiguous()


def int4_matmul(
    x: torch.Tensor,
    weight_q: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    workspace: SplitWorkspace | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """``x @ w.T + bias``.

    Args:
        x: [M, K], unit stride in K.
        weight_q: [ceil(K / 128), N, 16] int32, from ``pack(values, 4)``.
        scales: [K / group, N]; the group follows from its shape.
        bias: [N] or None.
        out: [M, N], unit stride in N.
        workspace: for few tokens; without it K is not split, which is slow for narrow weights.
        num_splits: instead of what the card calls for (tests).
    """
    group = x.shape[1] // scales.shape[0]
    assert group in GROUPS
    assert group * scales.shape[0] == x.shape[1]
    return packed_matmul(
        x,
        weight_q,
        scales,
        bias,
        bits=BITS,
        group=group,
        out=out,
        workspace=workspace,
        config=launch_config("int4_matmul", m=x.shape[0], group=group, dtype=TRITON_TYPES[x.dtype]),
        num_splits=num_splits,
    )


def reference(
    x: torch.Tensor, weight_q: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The same in plain torch, in x's type."""
    group = x.shape[1] // scales.shape[0]
    values = unpack(weight_q, BITS, x.shape[1]).to(x.dtype)
    weight = values * scales.T.to(x.dtype).repeat_interleave(group, dim=1)
    product = x @ weight.T
    return product if bias is None else product + bias.to(x.dtype)


def variants() -> list[Variant]:
    """Every number of tokens; group 64 lies between the others, float16 differs in constants."""
    cases = [(torch.bfloat16, group, m) for group in (32, 128) for m in (1, 16, 64, 1024)]
    cases += [(torch.bfloat16, 64, 1), (torch.bfloat16, 64, 1024)]
    cases += [(torch.float16, 128, 1), (torch.float32, 128, 1)]
    return [
        packed_variant(
            f"{TRITON_TYPES[dtype]} group {group} m {m}",
            dtype=dtype,
            bits=BITS,
            group=group,
            config=launch_config("int4_matmul", m=m, group=group, dtype=TRITON_TYPES[dtype]),
        )
        for dtype, group, m in cases
    ]


def tuning_cases(
    device: torch.device, *, num_outputs: int = 28672, size: int = 8192
) -> Iterator[TuningCase]:
    """By the number of tokens."""
    return packed_tuning_cases(
        "int4_matmul", device, bits=BITS, group=128, num_outputs=num_outputs, size=size
    )


__all__ = ["GROUPS", "int4_matmul", "pack", "quantise", "reference", "variants"]
