"""One kernel on one input: what it computes, how exact it must be, and what it moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(slots=True, frozen=True, kw_only=True)
class Case:
    """Tensors live as long as the case does."""

    kernel: str
    """Name of its file."""
    inputs: str
    """Shapes and types, for the table."""
    run: Callable[[], torch.Tensor]
    """Launch it and return its output, the same memory every time."""
    error: Callable[[], float]
    """Run it and compare: by default ``relative_error``."""
    bound: float
    """Largest error allowed."""
    num_bytes: int = 0
    """That must be read and written at least."""
    num_flops: int = 0
    target: float = 0.0
    """Share of the floor that an H200-class card should reach; 0: none is named."""


def relative_error(
    run: Callable[[], torch.Tensor], expected: Callable[[], torch.Tensor]
) -> Callable[[], float]:
    """Largest error relative to the largest magnitude expected; infinite where any is no number.

    Args:
        run: the kernel.
        expected: its output in float64, from its plain reference.
    """

    def error() -> float:
        found, wanted = run().double(), expected()
        assert wanted.dtype == torch.float64
        assert found.shape == wanted.shape
        if not bool(torch.isfinite(found).all()):
            return float("inf")
        return float((found - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-30)

    return error


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that no kernel may leave as it is."""
    if not dtype.is_floating_point:
        return torch.full(shape, 0xFF if dtype == torch.uint8 else -1, dtype=dtype, device=device)
    return torch.full(shape, float("nan"), dtype=dtype, device=device)
