"""The CPU's KV cache memory in its storage formats, as arrays that the kernels index.

Of each block, layer and KV head, K lies transposed, so that scores of 16 keys are read as one
vector per element of the query, and V as it comes, so that outputs are::

    K  [D, block_size] elements | int8 only: [block_size] x float32 scales
    V  [block_size, D] elements | int8 only: [block_size] x float32 scales

An element is a float32 (fp32), 16 bits of bfloat16 (dtype uint16) or float16 (int16), or an int8.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided

from engine.backend import KVCacheSpec, KVMemory
from engine.backends.cpu.vector_ir import LANES
from mesh.errors import ConfigError
from mesh.shared_mapping import SharedMapping

_STORAGE: dict[str, npt.DTypeLike] = {
    "fp32": np.float32,
    "bf16": np.uint16,
    "fp16": np.int16,
    "int8": np.int8,
}


@dataclass(slots=True, frozen=True)
class KVView:
    """What kernels read and write."""

    keys: npt.NDArray[Any]
    """[num_blocks, num_layers, Hkv, D, block_size] in the storage dtype."""
    values: npt.NDArray[Any]
    """[num_blocks, num_layers, Hkv, block_size, D] in the storage dtype."""
    scales: npt.NDArray[np.float32]
    """[num_blocks, num_layers, 2, Hkv, block_size]; one shared 1.0 unless int8."""


def allocate(spec: KVCacheSpec) -> tuple[KVMemory, KVView]:
    """Map the cache's memory; pages are touched on first use only.

    Returns:
        The memory, and the kernels' view of it.

    Raises:
        ConfigError: a size is not a multiple of 16, the kernels' vectors.
    """
    if spec.block_size % LANES or spec.head_dim % LANES:
        raise ConfigError(
            f"block_size: {spec.block_size} and the model's head_dim {spec.head_dim} must be "
            f"multiples of {LANES}"
        )
    # A shared mapping: what lets the workers of this host map it and copy once.
    mapping = SharedMapping(spec.num_blocks * spec.block_bytes)
    memory = memoryview(mapping.memory)[: spec.num_blocks * spec.block_bytes]
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.memory.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(memory, dtype=torch.uint8).view(spec.num_blocks, spec.block_bytes)
    dtype = np.dtype(_STORAGE[spec.dtype])
    heads = (spec.num_blocks, spec.num_layers, 2, spec.num_kv_heads)
    elements = np.frombuffer(memory, dtype).reshape(*heads, -1)
    num_elements = spec.block_size * spec.head_dim
    keys = elements[:, :, 0, :, :num_elements].reshape(
        *heads[:2], spec.num_kv_heads, spec.head_dim, spec.block_size, copy=False
    )
    values = elements[:, :, 1, :, :num_elements].reshape(
        *heads[:2], spec.num_kv_heads, spec.block_size, spec.head_dim, copy=False
    )
    if spec.dtype == "int8":
        scales = np.frombuffer(memory, np.float32).reshape(*heads, -1)[..., -spec.block_size :]
    else:
        scales = as_strided(np.ones(1, np.float32), (*heads, spec.block_size), (0,) * 5)
    return KVMemory(raw, mapping), KVView(keys, values, scales)
