"""The GPU's KV cache: one pool of bytes, seen as the tensors that kernels index.

Of each block, layer and KV head, K and V lie alike, a row per token, so that a warp reads a key in
whole cache lines; int8 rows have their scales behind them::

    [block_size, D] elements | int8 only: [block_size] x float32 scales

A value is ``element * scale``; the scale is the row's largest magnitude / 127.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.backend import KVCacheSpec
from mesh.errors import ConfigError

ELEMENT_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
}
_WIDE_LOAD_BYTES = 16


@dataclass(slots=True, frozen=True)
class KVView:
    """Strided views of one pool; they own nothing. ``keys[:, layer]`` is what a kernel takes."""

    keys: torch.Tensor
    """[num_blocks, num_layers, Hkv, block_size, D]."""
    values: torch.Tensor
    """[num_blocks, num_layers, Hkv, block_size, D]."""
    k_scales: torch.Tensor | None
    """[num_blocks, num_layers, Hkv, block_size] float32; None unless int8."""
    v_scales: torch.Tensor | None
    """[num_blocks, num_layers, Hkv, block_size] float32; None unless int8."""


def check_geometry(spec: KVCacheSpec) -> None:
    """Refuse what the kernels can't read.

    Raises:
        ConfigError: The rows of a block do not fill whole 16-byte loads, or D is odd.
    """
    if spec.head_dim % 2:
        raise ConfigError(f"head_dim {spec.head_dim} must be even on a GPU")
    if spec.block_size * spec.row_bytes % _WIDE_LOAD_BYTES or spec.block_size < 1:
        raise ConfigError(
            f"block_size {spec.block_size} x {spec.row_bytes} bytes of a {spec.dtype} row must be "
            f"a multiple of {_WIDE_LOAD_BYTES} bytes on a GPU"
        )


def kv_view(pool: torch.Tensor, spec: KVCacheSpec) -> KVView:
    """See the pool's bytes as keys, values and scales.

    Args:
        pool: [num_blocks, block_bytes] uint8, contiguous, on any device.
        spec: Its geometry.

    Raises:
        ConfigError: See ``check_geometry``.
        ValueError: The pool is not of this geometry.
    """
    check_geometry(spec)
    if pool.dtype != torch.uint8 or pool.shape != (spec.num_blocks, spec.block_bytes):
        raise ValueError(
            f"a pool of {list(pool.shape)} {pool.dtype} is not "
            f"[{spec.num_blocks}, {spec.block_bytes}] uint8"
        )
    heads = (spec.num_blocks, spec.num_layers, 2, spec.num_kv_heads)
    num_elements = spec.block_size * spec.head_dim
    elements = pool.view(ELEMENT_DTYPES[spec.dtype]).view(*heads, -1)[..., :num_elements]
    keys, values = elements.view(*heads, spec.block_size, spec.head_dim).unbind(2)
    if spec.dtype != "int8":
        return KVView(keys, values, None, None)
    scales = pool.view(torch.float32).view(*heads, -1)[..., -spec.block_size :]
    k_scales, v_scales = scales.unbind(2)
    return KVView(keys, values, k_scales, v_scales)
