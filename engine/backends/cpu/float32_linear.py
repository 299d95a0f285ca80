"""Matrix multiplication and embedding in float32.

A product is one chain of fused multiply-adds over k per element, whatever rows are computed beside
it: a library's choice of kernel depends on their number, and with it the last bits.
"""

from __future__ import annotations

from typing import Any

import numba
import torch

from engine.backends.cpu.elementwise import address
from engine.backends.cpu.intrinsics import matrix
from engine.backends.cpu.microkernel import TILE_ROWS, fma_rows, tile_vectors
from engine.backends.cpu.vector_ir import LANES
from engine.backends.cpu.workspace import Workspace


@numba.njit(parallel=True, nogil=True, cache=True, boundscheck=False)
def _matmul(
    x: Any, rows: Any, size: Any, packed: Any, blocks: Any, together: Any, out: Any, threads: Any
) -> None:
    """out [T, 16 B] = x [T, K] · packed [B, K, 16], ``together`` blocks at a time.

    ``x``, ``packed`` and ``out`` are addresses; threads split the blocks.
    """
    width = blocks * LANES
    source = matrix(packed, 1, 1)
    for thread in numba.prange(threads):
        first = blocks * thread // threads
        last = blocks * (thread + 1) // threads
        for block in range(first, last, together):
            fma_rows(
                0, rows, min(together, last - block), source, x, size,
                packed + block * size * LANES * 4, LANES, size * LANES,
                out + block * LANES * 4, width, size,
            )  # fmt: skip


def blocks_together(rows: int) -> int:
    """How many blocks of 16 columns a tile of so many rows takes."""
    return tile_vectors(max(1, min(rows, TILE_ROWS)))


class Float32Linear:
    """``x @ weight.T + bias`` in float32; keeps the weights in blocks of 16 columns."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, workspace: Workspace
    ) -> None:
        """Pack [out, in]."""
        self.out_features, in_features = weight.shape
        self.num_blocks = -(-self.out_features // LANES)
        self.packed = torch.zeros(self.num_blocks, in_features, LANES)
        """[ceil(out / 16), in, 16]."""
        for block, columns in enumerate(weight.split(LANES)):
            self.packed[block, :, : len(columns)] = columns.T
        self.packed_address = address(self.packed)
        self.bias = bias
        self.kernel = _matmul
        self._workspace = workspace
        self.num_bytes = self.packed.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] → [T, out]."""
        rows, size = x.shape
        out = torch.empty(rows, self.num_blocks * LANES)
        self.kernel(
            address(x), rows, size, self.packed_address, self.num_blocks, blocks_together(rows),
            address(out), self._workspace.num_threads,
        )  # fmt: skip
        if out.shape[1] != self.out_features:
            out = out[:, : self.out_features].contiguous()
        return out if self.bias is None else out.add_(self.bias)


class Float32Embedding:
    """Rows of a float32 table."""

    def __init__(self, weight: torch.Tensor, *, shared: bool) -> None:
        self._weight = weight
        self.num_bytes = 0 if shared else weight.numel() * 4

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 → [T, H], freshly allocated (it becomes the residual stream)."""
        return torch.index_select(self._weight, 0, token_ids)
