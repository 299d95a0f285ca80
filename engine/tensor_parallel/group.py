"""The ranks that compute one model together, and what they do together."""

from __future__ import annotations

import torch


class TensorParallelGroup:
    """One rank's membership. This base is the group of a single rank: nothing to do together."""

    rank = 0
    size = 1
    num_all_reduces = 0
    """Since the start; those within a captured graph count once."""
    num_gathers = 0
    num_broadcasts = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks in place; every rank gets the same bits."""
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, of equal shapes, on rank 0; nothing on the others."""
        return [x]

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite every rank's tensor, of equal shapes, with rank 0's."""

    def least(self, value: int) -> int:
        """The smallest of the ranks' values, on every rank."""
        return value

    def expect_steps(self) -> None:
        """Everything is loaded and compiled: from now on, be less patient."""
