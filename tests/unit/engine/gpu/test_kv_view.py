"""Views of the GPU's KV pool: every byte of a block belongs to one element of one view."""

from __future__ import annotations

import pytest
import torch

from engine.backend import KVCacheSpec, KVDtype
from engine.backends.gpu.kv_view import kv_view
from mesh.errors import ConfigError

NUM_BLOCKS, NUM_LAYERS, NUM_HEADS, BLOCK_SIZE, HEAD_DIM = 3, 2, 2, 8, 16


def spec_of(dtype: KVDtype, block_size: int = BLOCK_SIZE, head_dim: int = HEAD_DIM) -> KVCacheSpec:
    return KVCacheSpec(
        num_blocks=NUM_BLOCKS,
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_HEADS,
        block_size=block_size,
        head_dim=head_dim,
        dtype=dtype,
    )


def pool_of(spec: KVCacheSpec) -> torch.Tensor:
    return torch.zeros(spec.num_blocks, spec.block_bytes, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8"])
def test_views_cover_the_pool_once(dtype: KVDtype) -> None:
    spec = spec_of(dtype)
    pool = pool_of(spec)
    view = kv_view(pool, spec)
    parts = [view.keys, view.values, view.k_scales, view.v_scales]
    views = [part for part in parts if part is not None]
    assert len(views) == (4 if dtype == "int8" else 2)
    covered = 0
    for part in views:
        pool.zero_()
        part.copy_(torch.ones_like(part))  # of every dtype, some byte of 1 is not zero
        found = part.clone()
        for other in views:
            if other is not part:
                other.zero_()
        assert torch.equal(part, found)
        covered += part.numel() * part.element_size()
    assert covered == pool.numel()


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_an_element_lies_where_the_format_says(dtype: KVDtype) -> None:
    spec = spec_of(dtype)
    pool = pool_of(spec)
    view = kv_view(pool, spec)
    block, layer, head, token, dim = 2, 1, 1, 5, 3
    span = BLOCK_SIZE * spec.row_bytes
    width = view.values.element_size()
    first = ((layer * 2 + 1) * NUM_HEADS + head) * span
    view.values[block, layer, head, token, dim] = 1
    assert pool[block].nonzero().min() >= first + (token * HEAD_DIM + dim) * width
    assert pool[block].nonzero().max() < first + (token * HEAD_DIM + dim + 1) * width
    if view.v_scales is not None:
        pool.zero_()
        view.v_scales[block, layer, head, token] = 1.0
        at = first + BLOCK_SIZE * HEAD_DIM + 4 * token
        assert pool[block, at : at + 4].view(torch.float32).item() == 1.0


def test_unreadable_geometry_is_refused() -> None:
    for spec in (spec_of("int8", block_size=2, head_dim=18), spec_of("bf16", head_dim=15)):
        with pytest.raises(ConfigError):
            kv_view(pool_of(spec), spec)


def test_a_pool_of_another_size_is_refused() -> None:
    spec = spec_of("bf16")
    with pytest.raises(ValueError, match="is not"):
        kv_view(pool_of(spec)[:, :-16].contiguous(), spec)
