"""What the sampling kernels of one launch hand on to each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK = 4096
"""Tokens of one program."""
MAX_CHUNKS = 64
"""Of one row: every program reads what all of its row's have stored."""
MAX_PASSES = 8
"""Of one search: 32 bits, 4 at a time."""


@dataclass(slots=True, frozen=True)
class SampleWorkspace:
    """One launch at a time may use it: it belongs to one stream."""

    maxima: torch.Tensor
    """[rows, chunks] float32."""
    first_maxima: torch.Tensor
    """[rows, chunks] int32: token ids."""
    lows: torch.Tensor
    """[2 (top-k, top-p), passes, rows] int32: lower ends of the intervals."""
    targets: torch.Tensor
    """[rows] float32: mass that top-p must hold."""
    partials: torch.Tensor
    """[2 (top-k, top-p), 2 (odd and even passes), rows, chunks, 16] float32."""
    thresholds: torch.Tensor
    """[rows] int32: key of the smallest logit kept."""
    masses: torch.Tensor
    """[rows, chunks] float32: of what is kept."""
    chunk: int
    """Tokens of one program."""

    @classmethod
    def allocate(
        cls, device: torch.device, *, max_rows: int, vocabulary: int, chunk: int = CHUNK
    ) -> SampleWorkspace:
        """For up to ``max_rows`` rows of up to ``vocabulary`` logits.

        Raises:
            ValueError: The vocabulary is more than MAX_CHUNKS chunks.
        """
        if vocabulary > MAX_CHUNKS * chunk:
            raise ValueError(f"vocabulary of {vocabulary} is larger than {MAX_CHUNKS * chunk}")
        chunks = -(-vocabulary // chunk)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            maxima=empty(max_rows, chunks),
            first_maxima=empty(max_rows, chunks, dtype=torch.int32),
            lows=empty(2, MAX_PASSES, max_rows, dtype=torch.int32),
            targets=empty(max_rows),
            partials=empty(2, 2, max_rows, chunks, 16),
            thresholds=empty(max_rows, dtype=torch.int32),
            masses=empty(max_rows, chunks),
            chunk=chunk,
        )
