"""The CPU's KV cache memory in its storage formats, as arrays that the kernels index.

A row is one token's K or V of one head: D elements, and for int8 a float32 scale behind them, so a
block stays one contiguous span whatever the format.

    fp32   D x float32        bf16   D x 16 bits (dtype uint16)
    fp16   D x 16 bits (int16)        int8   D x int8 | 1 x float32
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided

from engine.backends.base import KVCacheSpec

_STORAGE: dict[str, npt.DTypeLike] = {
    "fp32": np.float32,
    "bf16": np.uint16,
    "fp16": np.int16,
    "int8": np.int8,
}


@dataclass(slots=True, frozen=True)
class KVView:
    """What kernels read and write."""

    rows: npt.NDArray[Any]
    """[num_blocks, num_layers, 2, Hkv, block_size, D] in the storage dtype."""
    scales: npt.NDArray[np.float32]
    """[num_blocks, num_layers, 2, Hkv, block_size]; one shared 1.0 unless int8."""


def allocate(spec: KVCacheSpec) -> tuple[torch.Tensor, KVView]:
    """Map the cache's memory; pages are touched on first use only.

    Returns:
        The raw bytes, [num_blocks, block_bytes] uint8, and the kernels' view of them.
    """
    # A shared mapping: what lets a transfer library on this host map it and copy once.
    memory = mmap.mmap(-1, spec.num_blocks * spec.block_bytes)
    raw = torch.frombuffer(memory, dtype=torch.uint8).view(spec.num_blocks, spec.block_bytes)
    dtype = np.dtype(_STORAGE[spec.dtype])
    shape = (spec.num_blocks, spec.num_layers, 2, spec.num_kv_heads, spec.block_size)
    if spec.dtype != "int8":
        rows = np.frombuffer(memory, dtype).reshape(*shape, spec.head_dim)
        one = as_strided(np.ones(1, np.float32), shape, (0,) * len(shape))
        return raw, KVView(rows, one)
    row_bytes = spec.row_bytes
    padded = np.frombuffer(memory, np.int8).reshape(*shape, row_bytes)
    scales = np.frombuffer(memory, np.float32).reshape(*shape, row_bytes // 4)
    return raw, KVView(padded[..., : spec.head_dim], scales[..., -1])
