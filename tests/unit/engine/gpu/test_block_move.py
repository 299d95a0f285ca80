"""Blocks gathered from a pool and scattered into another: byte for byte, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.backend import KVCacheSpec, KVDtype
from engine.backends.cpu import kv_store
from engine.backends.gpu.kernels.transfer.block_move import (
    gather_blocks,
    reference,
    scatter_blocks,
    staging_shape,
)
from engine.backends.gpu.kv_view import kv_view

NUM_HEADS = 4
POISON = 0xA5
IDS = torch.tensor([5, 0, 3])


def spec_of(dtype: KVDtype, *, block_size: int = 8, head_dim: int = 16) -> KVCacheSpec:
    return KVCacheSpec(
        num_blocks=6,
        num_layers=2,
        num_kv_heads=NUM_HEADS,
        block_size=block_size,
        head_dim=head_dim,
        dtype=dtype,
    )


def random_pool(spec: KVCacheSpec) -> torch.Tensor:
    generator = torch.Generator().manual_seed(spec.block_bytes)
    shape = (spec.num_blocks, spec.block_bytes)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def gathered(
    pool: torch.Tensor, spec: KVCacheSpec, heads: tuple[int, int], *, keys_by_dim: bool
) -> torch.Tensor:
    staging = torch.full(staging_shape(spec, len(IDS), heads), POISON, dtype=torch.uint8)
    gather_blocks(pool, spec, IDS, heads, staging, keys_by_dim=keys_by_dim)
    return staging


CASES = [
    (spec_of("fp16"), (0, NUM_HEADS)),
    (spec_of("bf16", block_size=32, head_dim=64), (1, 3)),  # more than one program a row
    (spec_of("fp32", block_size=12, head_dim=24), (3, 4)),
    (spec_of("int8", block_size=16), (0, 2)),
    (spec_of("int8", block_size=12, head_dim=20), (1, 4)),
]


@pytest.mark.parametrize(("spec", "heads"), CASES)
@pytest.mark.parametrize("keys_by_dim", [False, True])
def test_a_head_range_is_gathered(
    spec: KVCacheSpec, heads: tuple[int, int], keys_by_dim: bool
) -> None:
    pool = random_pool(spec)
    before = pool.clone()
    staging = gathered(pool, spec, heads, keys_by_dim=keys_by_dim)
    assert torch.equal(staging, reference(pool, spec, IDS, heads, keys_by_dim=keys_by_dim))
    assert torch.equal(pool, before)


@pytest.mark.parametrize(("spec", "heads"), CASES)
@pytest.mark.parametrize("keys_by_dim", [False, True])
def test_what_is_scattered_is_gathered_again(
    spec: KVCacheSpec, heads: tuple[int, int], keys_by_dim: bool
) -> None:
    staging = gathered(random_pool(spec), spec, heads, keys_by_dim=keys_by_dim)
    other = torch.full((spec.num_blocks, spec.block_bytes), POISON, dtype=torch.uint8)
    scatter_blocks(staging, other, spec, IDS, heads, keys_by_dim=keys_by_dim)
    assert torch.equal(gathered(other, spec, heads, keys_by_dim=keys_by_dim), staging)
    rows = other.view(spec.num_blocks, spec.num_layers * 2, NUM_HEADS, -1)
    rows[IDS, :, heads[0] : heads[1]] = POISON
    assert (rows == POISON).all()


def test_a_rank_of_half_the_heads_takes_its_share() -> None:
    whole = spec_of("fp16")
    pool = random_pool(whole)
    rank = KVCacheSpec(
        num_blocks=3, num_layers=2, num_kv_heads=2, block_size=8, head_dim=16, dtype="fp16"
    )
    own = torch.full((3, rank.block_bytes), POISON, dtype=torch.uint8)
    staging = gathered(pool, whole, (2, 4), keys_by_dim=False)
    scatter_blocks(staging, own, rank, torch.tensor([1, 2, 0]), (0, 2))
    found, there = kv_view(own, rank), kv_view(pool, whole)
    for mine, theirs in zip([1, 2, 0], IDS.tolist(), strict=True):
        for name in ("keys", "values"):
            expected = getattr(there, name)[theirs, :, 2:].view(torch.int16)
            assert torch.equal(getattr(found, name)[mine].view(torch.int16), expected)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
def test_keys_by_dim_are_the_cpu_backends(dtype: KVDtype) -> None:
    spec = spec_of(dtype, block_size=16)
    memory, cpu = kv_store.allocate(spec)
    memory.raw.copy_(random_pool(spec))
    pool = torch.zeros(spec.num_blocks, spec.block_bytes, dtype=torch.uint8)
    blocks = torch.arange(spec.num_blocks)
    staging = memory.raw.view(staging_shape(spec, spec.num_blocks, (0, NUM_HEADS)))
    scatter_blocks(staging, pool, spec, blocks, (0, NUM_HEADS), keys_by_dim=True)
    gpu = kv_view(pool, spec)
    bits = {"fp32": torch.int32, "fp16": torch.int16, "int8": torch.int8}[dtype]
    width = bits.itemsize
    keys = cpu.keys.swapaxes(3, 4).copy().view(f"i{width}")
    assert np.array_equal(keys, gpu.keys.view(bits).numpy())
    assert np.array_equal(cpu.values.view(f"i{width}"), gpu.values.view(bits).numpy())
    if gpu.k_scales is not None and gpu.v_scales is not None:
        scales = np.stack([gpu.k_scales.numpy(), gpu.v_scales.numpy()], axis=2)
        assert np.array_equal(cpu.scales.view(np.int32), scales.view(np.int32))


def test_no_blocks() -> None:
    spec = spec_of("fp16")
    none = torch.empty(0, dtype=torch.int64)
    staging = torch.empty(staging_shape(spec, 0, (0, 1)), dtype=torch.uint8)
    gather_blocks(random_pool(spec), spec, none, (0, 1), staging)
