"""Decode attention against float64: ragged, empty and one-token contexts, splits, windows."""

from __future__ import annotations

import pytest
import torch

from engine.backend import KVDtype
from engine.backends.gpu.kernels.attention.paged_decode import (
    MAX_SPLITS,
    MIN_SPLIT_KEYS,
    choose_splits,
    paged_decode,
    reference,
    workspace_size,
)
from tests.unit.engine.gpu.paged_cache import ACTIVATION, PagedCache

RAGGED = [70, 0, 1, 33, 200, 16]
TOLERANCE = {"fp32": 4e-6, "fp16": 2e-3, "bf16": 1e-2, "int8": 4e-6}
"""By what rounds: the dtype of activations, or what the cache's is multiplied in."""


def check(
    lengths: list[int] = RAGGED, *, activation: str = "fp32", dtype: KVDtype = "fp32",
    group: int = 2, num_kv_heads: int = 2, head_dim: int = 32, block_size: int = 16,
    window: int = 0, softcap: float = 0.0, num_splits: int = 1,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(sum(lengths) + group + window + num_splits)
    cache = PagedCache(
        lengths, dtype=dtype, num_kv_heads=num_kv_heads, block_size=block_size,
        head_dim=head_dim, generator=generator,
    )  # fmt: skip
    num_q_heads = num_kv_heads * group
    # As the model has them: q is the front of a row that holds k and v too.
    qkv = torch.randn(
        len(lengths), (num_q_heads + 2 * num_kv_heads) * head_dim, generator=generator
    )
    qkv = qkv.to(ACTIVATION[activation])
    q = qkv[:, : num_q_heads * head_dim].view(-1, num_q_heads, head_dim)
    out = torch.full((len(lengths), num_q_heads, head_dim), torch.nan, dtype=q.dtype)
    size = workspace_size(len(lengths), num_q_heads, head_dim, num_splits)
    workspace = torch.full((size + 3,), torch.nan)
    scale = head_dim**-0.5 * 2
    paged_decode(
        q, *cache.layer(), cache.block_tables, cache.context_lens, scale=scale, window=window,
        softcap=softcap, out=out, workspace=workspace, num_splits=num_splits,
    )  # fmt: skip
    assert workspace[size:].isnan().all()
    tolerance = max(TOLERANCE[activation], TOLERANCE[dtype])
    for row, length in enumerate(lengths):
        expected = torch.zeros(num_q_heads, head_dim, dtype=torch.float64)
        if length:
            expected = reference(
                q[row].double(), cache.keys[row], cache.values[row], scale=scale, window=window,
                softcap=softcap,
            )  # fmt: skip
        torch.testing.assert_close(out[row].double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
def test_query_heads_share_a_kv_head(group: int) -> None:
    check([40, 0, 1], group=group, num_kv_heads=1 if group == 8 else 3)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 12, 100])
@pytest.mark.parametrize("window", [0, 21])
def test_any_block_size(block_size: int, window: int) -> None:
    check([70, 1, 133], block_size=block_size, window=window)


@pytest.mark.parametrize("num_splits", [1, 2, 3, MAX_SPLITS])
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_splits_of_ragged_contexts(num_splits: int, dtype: KVDtype) -> None:
    lengths = [0, 1, MIN_SPLIT_KEYS, MIN_SPLIT_KEYS + 1, 2 * MIN_SPLIT_KEYS + 77]
    check(lengths, dtype=dtype, num_kv_heads=1, num_splits=num_splits)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 150, 1000])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_window_hides_the_keys_before_it(window: int, num_splits: int) -> None:
    check([200, 5, 0, 16], num_kv_heads=1, window=window, num_splits=num_splits)


def test_blocks_before_the_window_are_not_read() -> None:
    generator = torch.Generator().manual_seed(1)
    cache = PagedCache(
        [100], dtype="fp32", num_kv_heads=1, block_size=8, head_dim=16, generator=generator
    )
    cache.block_tables[0, : (100 - 20) // 8] = 1 << 29  # would be out of the pool
    q, out = torch.randn(1, 1, 16, generator=generator), torch.empty(1, 1, 16)
    paged_decode(
        q, *cache.layer(), cache.block_tables, cache.context_lens, scale=0.25, window=20, out=out,
        workspace=torch.empty(0), num_splits=1,
    )  # fmt: skip
    expected = reference(q[0].double(), cache.keys[0], cache.values[0], scale=0.25, window=20)
    torch.testing.assert_close(out[0].double(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_scores_are_capped(softcap: float, dtype: KVDtype) -> None:
    check([70, 1, 0], dtype=dtype, softcap=softcap, num_splits=2)


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [
        ("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp16"), ("fp32", "fp16"), ("fp32", "bf16"),
        ("bf16", "fp32"), ("bf16", "int8"), ("fp16", "int8"), ("fp32", "int8"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("head_dim", [32, 24, 64])
def test_dtypes(activation: str, dtype: KVDtype, head_dim: int) -> None:
    check([70, 0, 1, 130], activation=activation, dtype=dtype, head_dim=head_dim, num_splits=2)


def test_no_sequences() -> None:
    check([])


def test_splits_fill_the_card_evenly() -> None:
    assert choose_splits(1, 8, 128, 132) == 1  # nothing to split
    assert choose_splits(1, 8, 1 << 20, 132) == MAX_SPLITS
    assert choose_splits(512, 8, 8192, 132) == 1  # full without
    for batch in (1, 2, 3, 8, 32, 33, 200):
        for context in (1, 1000, 8192, 131072):
            splits = choose_splits(batch, 8, context, 132)
            assert 1 <= splits <= max(1, context // MIN_SPLIT_KEYS)
            if 1 < splits < min(MAX_SPLITS, context // MIN_SPLIT_KEYS):
                assert batch * 8 * splits >= 2 * 132
