"""Prefill attention against float64: chunks behind cached prefixes, windows, ragged batches."""

from __future__ import annotations

import pytest
import torch

from engine.backend import KVDtype
from engine.backends.gpu.kernels.attention.varlen_prefill import reference, varlen_prefill
from engine.backends.gpu.tuning import LaunchConfig
from tests.unit.engine.gpu.paged_cache import ACTIVATION, PagedCache

RAGGED = [(0, 40), (65, 1), (0, 0), (30, 21), (0, 1), (7, 100)]
"""(cached before, tokens of the chunk)."""
TOLERANCE = {"fp32": 4e-6, "fp16": 2e-3, "bf16": 1e-2, "int8": 4e-6}
"""By what rounds: the dtype of activations, or what the cache's is multiplied in."""


def check(
    chunks: list[tuple[int, int]] = RAGGED, *, activation: str = "fp32", dtype: KVDtype = "fp32",
    group: int = 2, num_kv_heads: int = 1, head_dim: int = 32, block_size: int = 16,
    window: int = 0, softcap: float = 0.0, tile: tuple[int, int] | None = (32, 32),
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(len(chunks) + group + window + block_size)
    cache = PagedCache(
        [cached + tokens for cached, tokens in chunks], dtype=dtype, num_kv_heads=num_kv_heads,
        block_size=block_size, head_dim=head_dim, generator=generator,
    )  # fmt: skip
    num_q_heads = num_kv_heads * group
    counts = torch.tensor([tokens for _, tokens in chunks])
    starts = torch.zeros(len(chunks) + 1, dtype=torch.int32)
    starts[1:] = counts.cumsum(0)
    num_tokens = int(starts[-1])
    num_rows = num_tokens + 2  # the last are padding
    qkv = torch.randn(num_rows, (num_q_heads + 2 * num_kv_heads) * head_dim, generator=generator)
    qkv = qkv.to(ACTIVATION[activation])
    q = qkv[:, : num_q_heads * head_dim].view(num_rows, num_q_heads, head_dim)
    out = torch.full((num_rows, num_q_heads, head_dim), torch.nan, dtype=q.dtype)
    scale = head_dim**-0.5 * 2
    meta = {} if tile is None else {"BLOCK_M": tile[0], "BLOCK_N": tile[1]}
    config = LaunchConfig(meta=meta, num_warps=4, num_stages=2)
    varlen_prefill(
        q, *cache.layer(), starts, cache.context_lens, cache.block_tables, scale=scale,
        window=window, softcap=softcap, max_query_len=max(1, *counts.tolist(), 0), out=out,
        config=None if tile is None else config,
    )  # fmt: skip
    tolerance = max(TOLERANCE[activation], TOLERANCE[dtype])
    for row in range(len(chunks)):
        rows = slice(int(starts[row]), int(starts[row + 1]))
        expected = reference(
            q[rows].double(), cache.keys[row], cache.values[row], scale=scale, window=window,
            softcap=softcap,
        )  # fmt: skip
        torch.testing.assert_close(out[rows].double(), expected, atol=tolerance, rtol=tolerance)
    assert out[num_tokens:].isnan().all()


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
def test_query_heads_share_a_kv_head(group: int) -> None:
    check(group=group, num_kv_heads=2 if group < 4 else 1)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 12])
@pytest.mark.parametrize("window", [0, 21])
def test_any_block_size(block_size: int, window: int) -> None:
    check(block_size=block_size, window=window)


@pytest.mark.parametrize(
    ("window", "dtype"),
    [(1, "fp32"), (15, "int8"), (16, "fp32"), (17, "fp32"), (64, "int8"), (1000, "fp32")],
)
def test_a_window_hides_the_keys_before_it(window: int, dtype: KVDtype) -> None:
    check(window=window, dtype=dtype)


def test_blocks_before_the_window_are_not_read() -> None:
    generator = torch.Generator().manual_seed(1)
    cache = PagedCache(
        [100], dtype="fp32", num_kv_heads=1, block_size=8, head_dim=16, generator=generator
    )
    cache.block_tables[0, : (100 - 10 - 20 + 1) // 8] = 1 << 29  # would be out of the pool
    q, out = torch.randn(10, 1, 16, generator=generator), torch.empty(10, 1, 16)
    varlen_prefill(
        q, *cache.layer(), torch.tensor([0, 10], dtype=torch.int32), cache.context_lens,
        cache.block_tables, scale=0.25, window=20, max_query_len=10, out=out,
    )  # fmt: skip
    expected = reference(q.double(), cache.keys[0], cache.values[0], scale=0.25, window=20)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_scores_are_capped(softcap: float, dtype: KVDtype) -> None:
    check(RAGGED[:3], dtype=dtype, softcap=softcap)


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [
        ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp16"), ("bf16", "fp32"), ("bf16", "int8"),
        ("fp16", "int8"), ("fp32", "int8"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("head_dim", [24, 64])
def test_dtypes(activation: str, dtype: KVDtype, head_dim: int) -> None:
    check(RAGGED[:4], activation=activation, dtype=dtype, head_dim=head_dim)


@pytest.mark.parametrize("longest", [1, 9, 100])
def test_the_tables_tiles_fit_chunks_of_every_length(longest: int) -> None:
    for activation in ("fp32", "bf16"):
        chunks = [(20, longest), (0, 1), (33, longest // 2)]
        check(chunks, activation=activation, dtype="fp16", group=4, tile=None)


@pytest.mark.parametrize("num_chunks", [0, 1, 2, 17])
def test_one_token_chunks_are_decoding(num_chunks: int) -> None:
    check([(5 * row, 1) for row in range(num_chunks)], tile=(16, 16))
