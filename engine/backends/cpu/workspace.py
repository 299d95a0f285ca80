"""What the products of one backend share."""

from __future__ import annotations

import numba
import torch


class Workspace:
    """Number of threads, and memory that is free again when a product is done.

    Owned by a backend, whose products run one after the other.
    """

    def __init__(self) -> None:
        self.num_threads: int = numba.get_num_threads()
        """Of the step."""
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> int:
        """The address of so many bytes, which hold anything."""
        if len(self._memory) < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        return self._memory.data_ptr()
