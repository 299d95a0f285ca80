"""The paged attention kernel against float64, in a cache where all that is not context is NaN."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.backend import KVCacheSpec, KVDtype
from engine.backends.cpu import kv_store
from engine.backends.cpu.attention import plan_tiles
from engine.backends.cpu.backend import CpuBackend
from engine.batch import BatchInputs, build_batch
from engine.scheduling.step_plan import ScheduledChunk
from mesh.errors import ConfigError
from tests.unit.engine.tiny_llama import new_sequence

NUM_LAYERS = 3
Chunks = list[tuple[int, int]]
"""(tokens computed before, tokens in this step) of each sequence."""

RAGGED: Chunks = [(0, 1), (0, 40), (63, 1), (15, 1), (16, 1), (30, 5), (0, 16), (31, 2), (129, 1)]
GEOMETRIES = [  # (query heads per KV head, head_dim, block_size)
    (1, 128, 32),
    (2, 32, 16),
    (2, 32, 32),
    (3, 64, 16),
    (4, 80, 16),
    (5, 64, 64),
    (8, 32, 128),
    (13, 96, 16),
]
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Case:
    """One layer's inputs, and the attention of every token in float64."""

    batch: BatchInputs
    keys: torch.Tensor
    """[num_blocks, layers, Hkv, block_size, D] float64, as the cache holds them."""
    values: torch.Tensor
    qkv: torch.Tensor
    backend: CpuBackend
    scale: float

    def run(self, layer: int, window: int = 0) -> npt.NDArray[np.float32]:
        step = self.backend.begin_step(self.batch)
        return self.backend.paged_attention(self.qkv, layer, self.scale, window, step).numpy()


def make_case(
    chunks: Chunks, group: int, head_dim: int, block_size: int, *, seed: int,
    num_kv_heads: int = 2, num_threads: int = 2, magnitude: float = 1.0, dtype: KVDtype = "fp32",
) -> Case:  # fmt: skip
    rng = np.random.default_rng(seed)
    sizes = [-(-(before + count) // block_size) for before, count in chunks]
    free = rng.permutation(np.arange(1, sum(sizes) + 4)).tolist()  # 0, which pads, is nobody's
    scheduled = []
    for (before, count), size in zip(chunks, sizes, strict=True):
        sequence = new_sequence([0] * (before + count))
        sequence.num_computed_tokens = before
        sequence.block_table = [free.pop() for _ in range(size)]
        scheduled.append(ScheduledChunk(sequence, count))
    batch = build_batch(scheduled, block_size)
    backend = CpuBackend("fp32", num_threads)
    spec = KVCacheSpec(
        num_blocks=sum(sizes) + 4,
        num_layers=NUM_LAYERS,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        dtype=dtype,
    )
    raw = backend.allocate_kv_cache(spec).raw
    keys, values = fill(raw, spec, scheduled, rng, magnitude)
    width = (num_kv_heads * group + 2 * num_kv_heads) * head_dim
    qkv = torch.from_numpy(rng.standard_normal((batch.num_tokens, width)).astype(np.float32))
    qkv[:, num_kv_heads * group * head_dim :] = math.nan  # k and v are read from the cache alone
    return Case(batch, keys, values, qkv * magnitude, backend, head_dim**-0.5)


def fill(
    raw: torch.Tensor, spec: KVCacheSpec, scheduled: list[ScheduledChunk],
    rng: np.random.Generator, magnitude: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Random K and V in the slots of every sequence's tokens, NaN (int8: in scales) elsewhere."""
    size = spec.block_size * spec.head_dim
    heads = (spec.num_blocks, spec.num_layers, 2, spec.num_kv_heads)
    used = torch.zeros(spec.num_blocks, spec.block_size, dtype=torch.bool)
    for chunk in scheduled:
        for position in range(chunk.sequence.num_tokens):
            block = chunk.sequence.block_table[position // spec.block_size]
            used[block, position % spec.block_size] = True
    shape = (*heads, spec.block_size, spec.head_dim)
    content = torch.from_numpy(rng.standard_normal(shape) * magnitude)
    unused = ~used[:, None, None, None, :]
    if spec.dtype == "int8":
        scales = (content.abs().amax(-1) / 127).float()
        content = (content / scales[..., None]).round()
        raw.view(torch.float32).view(*heads, -1)[..., -spec.block_size :] = torch.where(
            unused, torch.nan, scales
        )
        stored = raw.view(torch.int8).view(*heads, -1)[..., :size]
    else:
        content = torch.where(unused[..., None], torch.nan, content)
        stored = raw.view(TORCH_DTYPES[spec.dtype]).view(*heads, -1)
    stored[:, :, 0] = content[:, :, 0].transpose(-1, -2).reshape(*heads[:2], heads[3], size)
    stored[:, :, 1] = content[:, :, 1].reshape(*heads[:2], heads[3], size)
    held = content.to(stored.dtype).double()
    if spec.dtype == "int8":
        held *= scales[..., None]
    return held[:, :, 0], held[:, :, 1]


def reference(case: Case, layer: int, window: int = 0) -> npt.NDArray[np.float64]:
    batch, (keys_held, values_held) = (
        case.batch,
        (part[:, layer].numpy() for part in (case.keys, case.values)),
    )
    _, num_kv_heads, block_size, head_dim = keys_held.shape
    num_heads = case.qkv.shape[1] // head_dim - 2 * num_kv_heads
    out = np.empty((batch.num_tokens, num_heads * head_dim))
    for index, (start, end) in enumerate(itertools.pairwise(batch.query_starts)):
        for row in range(start, end):
            position = batch.positions[row]
            first = max(0, position - window + 1) if window else 0
            seen = np.arange(first, position + 1)
            blocks = batch.block_tables[index, seen // block_size]
            for head in range(num_heads):
                of_head = slice(head * head_dim, (head + 1) * head_dim)
                slots = (head // (num_heads // num_kv_heads), seen % block_size)
                keys, values = keys_held[blocks, *slots], values_held[blocks, *slots]
                scores = keys @ case.qkv[row, of_head].double().numpy() * case.scale
                weights = np.exp(scores - scores.max())
                out[row, of_head] = weights / weights.sum() @ values
    return out


@pytest.mark.parametrize(("group", "head_dim", "block_size"), GEOMETRIES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_ragged_mixes_of_prompts_and_decodes(
    group: int, head_dim: int, block_size: int, num_threads: int
) -> None:
    case = make_case(RAGGED, group, head_dim, block_size, seed=1, num_threads=num_threads)
    for layer in range(NUM_LAYERS):
        np.testing.assert_allclose(case.run(layer), reference(case, layer), atol=3e-6, rtol=0)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33, 64, 1000])
def test_a_sliding_window_hides_older_keys(window: int) -> None:
    case = make_case(RAGGED, 3, 64, 16, seed=2)
    np.testing.assert_allclose(case.run(1, window), reference(case, 1, window), atol=3e-6, rtol=0)


@pytest.mark.parametrize("count", [1, 2, 3, 15, 16, 17, 32, 33])
@pytest.mark.parametrize("before", [0, 1, 15, 16, 17])
def test_every_way_that_a_chunk_can_meet_a_block_boundary(before: int, count: int) -> None:
    case = make_case([(before, count)], 3, 64, 16, seed=3)
    np.testing.assert_allclose(case.run(0), reference(case, 0), atol=3e-6, rtol=0)


@pytest.mark.parametrize("num_decodes", [1, 2, 3, 16])
def test_decoding_batches_of_every_balance_between_threads(num_decodes: int) -> None:
    chunks = [(7 * index * index, 1) for index in range(num_decodes)]
    case = make_case(chunks, 3, 64, 16, seed=4)
    np.testing.assert_allclose(case.run(2), reference(case, 2), atol=3e-6, rtol=0)


def test_far_apart_scores_neither_overflow_nor_vanish() -> None:
    case = make_case(RAGGED, 3, 64, 16, seed=5, magnitude=30.0)
    np.testing.assert_allclose(case.run(0), reference(case, 0), atol=2e-2, rtol=0)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "int8"])
def test_every_format_of_the_cache(dtype: KVDtype) -> None:
    case = make_case(RAGGED, 3, 64, 16, seed=8, dtype=dtype)
    np.testing.assert_allclose(case.run(1), reference(case, 1), atol=3e-6, rtol=0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8"])
def test_a_row_does_not_depend_on_what_else_is_in_the_batch(dtype: KVDtype) -> None:
    together = make_case(RAGGED, 3, 64, 16, seed=6, dtype=dtype)
    whole = together.run(0)
    starts = together.batch.query_starts
    for index, (before, count) in enumerate(RAGGED):
        sequence = new_sequence([0] * (before + count))
        sequence.num_computed_tokens = before
        sequence.block_table = together.batch.block_tables[index].tolist()
        rows = slice(starts[index], starts[index + 1])
        batch = build_batch([ScheduledChunk(sequence, count)], 16)
        qkv = together.qkv[rows].contiguous()
        alone = replace(together, batch=batch, qkv=qkv)
        assert np.array_equal(alone.run(0), whole[rows])


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize(("group", "window"), [(1, 0), (3, 0), (3, 70), (8, 0)])
def test_decoding_gives_the_bits_of_prefilling(dtype: KVDtype, group: int, window: int) -> None:
    count = 150
    together = make_case([(0, count)], group, 64, 16, seed=9, dtype=dtype)
    whole = together.run(0, window)
    table = together.batch.block_tables[0].tolist()
    for position in range(count):
        sequence = new_sequence([0] * (position + 1))
        sequence.num_computed_tokens = position
        sequence.block_table = table[: position // 16 + 1]
        batch = build_batch([ScheduledChunk(sequence, 1)], 16)
        qkv = together.qkv[position : position + 1].contiguous()
        alone = replace(together, batch=batch, qkv=qkv)
        assert np.array_equal(alone.run(0, window)[0], whole[position])


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_the_tiles_cover_every_row_once_and_threads_share_them(num_threads: int) -> None:
    batch = make_case(RAGGED, 2, 32, 32, seed=7).batch
    tiles = plan_tiles(batch, 2, num_threads)
    rows = [
        row
        for first, count in zip(tiles.first_row, tiles.num_tokens, strict=True)
        for row in range(first, first + count)
    ]
    assert sorted(rows) == list(range(batch.num_tokens))
    for first, sequence, position in zip(
        tiles.first_row, tiles.sequence, tiles.first_position, strict=True
    ):
        assert batch.query_starts[sequence] <= first < batch.query_starts[sequence + 1]
        assert batch.positions[first] == position
    bounds = tiles.thread_bounds
    assert len(bounds) == num_threads + 1
    assert (bounds[0], bounds[-1]) == (0, 2 * len(tiles.sequence))
    assert (np.diff(bounds) >= 0).all()


@pytest.mark.parametrize(("head_dim", "block_size"), [(40, 16), (32, 8)])
def test_a_geometry_that_the_tiles_do_not_fit_is_refused(head_dim: int, block_size: int) -> None:
    spec = KVCacheSpec(
        num_blocks=1, num_layers=1, num_kv_heads=1, block_size=block_size, head_dim=head_dim,
        dtype="fp32",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="multiples of 16"):
        kv_store.allocate(spec)
