"""Matrix multiplication on CPU: float32 through torch, int8 weights through fbgemm."""

from __future__ import annotations

import warnings

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


class Int8Linear:
    """Per-output-channel symmetric int8 weights; activations quantised per call (fbgemm)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        scales = weight.abs().amax(dim=1).clamp_min(1e-12) / 127
        with warnings.catch_warnings():
            # The deprecation of torch.ao's eager mode does not concern the kernel itself.
            warnings.simplefilter("ignore")
            quantised = torch.quantize_per_channel(
                weight, scales, torch.zeros(len(scales), dtype=torch.long), 0, torch.qint8
            )
        self._packed = torch.ops.quantized.linear_prepack(quantised, bias)
        self.num_bytes = weight.numel() + 4 * len(scales)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] → [T, out]."""
        out: torch.Tensor = torch.ops.quantized.linear_dynamic(x, self._packed)
        return out


class Float32Embedding:
    """Rows of a float32 table."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.contiguous()
        self.num_bytes = weight.numel() * 4

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 → [T, H], freshly allocated (it becomes the residual stream)."""
        return torch.index_select(self._weight, 0, token_ids)
