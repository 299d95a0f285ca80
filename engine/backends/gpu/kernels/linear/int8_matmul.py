"""W8A16: 16-bit (or float32) activations times int8 weights with a scale per output."""

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

BITS = 8
_LARGEST = 127


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[N, K]`` floats → values ``[N, K]`` int8 in -127 .. 127 and scales ``[N]`` float32."""
    weight = weight.to(torch.float32)
    scales = weight.abs().amax(dim=1) / _LARGEST
    values = torch.where(scales[:, None] > 0, weight / scales[:, None], 0.0)
    return values.round().clamp(-_LARGEST, _LARGEST).to(torch.int8), scales


def int8_matmul(
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
        weight_q: [ceil(K / 64), N, 16] int32, from ``pack(values, 8)``.
        scales: [N] float32.
        bias: [N] or None.
        out: [M, N], unit stride in N.
        workspace: for few tokens; without it K is not split, which is slow for narrow weights.
        num_splits: instead of what the card calls for (tests).
    """
    return packed_matmul(
        x,
        weight_q,
        scales,
        bias,
        bits=BITS,
        group=0,
        out=out,
        workspace=workspace,
        config=launch_config("int8_matmul", m=x.shape[0], dtype=TRITON_TYPES[x.dtype]),
        num_splits=num_splits,
    )


def reference(
    x: torch.Tensor, weight_q: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The same in plain torch, in x's type."""
    values = unpack(weight_q, BITS, x.shape[1]).to(x.dtype)
    product = x @ values.T * scales.to(x.dtype)
    return product if bias is None else product + bias.to(x.dtype)


def variants() -> list[Variant]:
    """Every number of tokens; float16 takes fewer instructions than bfloat16."""
    cases = [(torch.bfloat16, m) for m in (1, 16, 64, 1024)]
    cases += [(torch.float16, 1), (torch.float32, 1)]
    return [
        packed_variant(
            f"{TRITON_TYPES[dtype]} m {m}",
            dtype=dtype,
            bits=BITS,
            group=0,
            config=launch_config("int8_matmul", m=m, dtype=TRITON_TYPES[dtype]),
        )
        for dtype, m in cases
    ]


def tuning_cases(
    device: torch.device, *, num_outputs: int = 28672, size: int = 8192
) -> Iterator[TuningCase]:
    """By the number of tokens."""
    return packed_tuning_cases(
        "int8_matmul", device, bits=BITS, group=0, num_outputs=num_outputs, size=size
    )


__all__ = ["int8_matmul", "pack", "quantise", "reference", "unpack", "variants"]
