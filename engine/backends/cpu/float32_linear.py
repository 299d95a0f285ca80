"""Matrix multiplication and embedding in float32, through torch."""

from __future__ import annotations

import torch


class Float32Linear:
    """``x @ weight.T + bias`` in float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight.contiguous()
        self._bias = bias
        self.num_bytes = weight.numel() * 4

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] → [T, out]."""
        return torch.nn.functional.linear(x, self._weight, self._bias)


class Float32Embedding:
    """Rows of a float32 table."""

    def __init__(self, weight: torch.Tensor, *, shared: bool) -> None:
        self._weight = weight
        self.num_bytes = 0 if shared else weight.numel() * 4

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 → [T, H], freshly allocated (it becomes the residual stream)."""
        return torch.index_select(self._weight, 0, token_ids)
