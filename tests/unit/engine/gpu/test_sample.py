"""Sampling without sorting: the reference's tokens, for every setting, type and size."""

from __future__ import annotations

import pytest
import torch

from engine.backends.gpu.kernels.sampling.sample import greedy, reference, sample
from engine.backends.gpu.kernels.sampling.sample_workspace import MAX_CHUNKS, SampleWorkspace

CPU = torch.device("cpu")
CHUNK = 128  # small, because the interpreter takes its time


def workspace(rows: int, vocabulary: int) -> SampleWorkspace:
    """Room for more than is asked for, full of what must not be read."""
    room = SampleWorkspace.allocate(
        CPU, max_rows=rows + 1, vocabulary=vocabulary + CHUNK, chunk=CHUNK
    )
    for tensor in (getattr(room, name) for name in SampleWorkspace.__slots__ if name != "chunk"):
        tensor.fill_(float("nan") if tensor.is_floating_point() else 1 << 30)
    return room


def strided(logits: torch.Tensor) -> torch.Tensor:
    """The same rows in a wider tensor, with NaN beside them."""
    rows, vocabulary = logits.shape
    wide = torch.full((rows, vocabulary + 16), float("nan"), dtype=logits.dtype)
    wide[:, :vocabulary] = logits
    return wide[:, :vocabulary]


class Settings:
    """Per-row parameters, from scalars."""

    def __init__(
        self, rows: int, *, t: float = 1.0, k: int = 0, p: float = 1.0, min_p: float = 0.0
    ) -> None:
        self.values = (
            torch.full((rows,), t),
            torch.full((rows,), k, dtype=torch.int32),
            torch.full((rows,), p),
            torch.full((rows,), min_p),
        )

    def set_row(self, row: int, *values: float) -> None:
        for tensor, value in zip(self.values, values, strict=True):
            tensor[row] = value


def draw(
    logits: torch.Tensor, settings: Settings, uniforms: torch.Tensor, **options: object
) -> torch.Tensor:
    out = torch.full((len(logits),), -7, dtype=torch.int64)
    room = workspace(*logits.shape)
    options = {"out": out, "workspace": room, **options}
    assert sample(strided(logits), *settings.values, uniforms, **options) is out
    return out


def assert_drawn(
    tokens: torch.Tensor, logits: torch.Tensor, settings: Settings, uniforms: torch.Tensor
) -> None:
    """Each token's span of the reference's cumulative weights holds the number, to rounding."""
    weights = reference(logits, *settings.values)
    ends = weights.cumsum(1) / weights.sum(1, keepdim=True)
    for row, token in enumerate(tokens.tolist()):
        assert weights[row, token] > 0, f"row {row}: token {token} was dropped"
        end = float(ends[row, token])
        start = end - float(weights[row, token] / weights[row].sum())
        assert start - 2e-6 <= float(uniforms[row]) < end + 2e-6, f"row {row}"


SETTINGS = [
    {},
    {"t": 0.0},
    {"t": 0.3},
    {"t": 1e-9},
    {"k": 1},
    {"k": 7},
    {"k": 5000},
    {"p": 0.6},
    {"p": 1e-6},
    {"p": 0.9999},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"t": 1.7, "k": 40, "p": 0.8, "min_p": 0.02},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_the_references(options: dict[str, float], dtype: torch.dtype) -> None:
    logits = (torch.randn(2, 200) * 3).to(dtype)
    settings, uniforms = Settings(2, **options), torch.rand(2)
    assert_drawn(draw(logits, settings, uniforms), logits, settings, uniforms)


def test_float16_logits() -> None:
    logits, uniforms = torch.randn(1, 100).to(torch.float16), torch.rand(1)
    settings = Settings(1, k=20, p=0.7)
    assert_drawn(draw(logits, settings, uniforms), logits, settings, uniforms)


@pytest.mark.parametrize("seed", range(8))
def test_a_batch_of_different_rows(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def pick(*values: float) -> float:
        return values[int(torch.randint(len(values), (), generator=generator))]

    vocabulary = int(pick(1, 2, 100, CHUNK, CHUNK + 1, 3 * CHUNK - 5))
    rows = 3
    logits = torch.randn(rows, vocabulary, generator=generator) * pick(0.1, 3, 10)
    settings = Settings(rows)
    for row in range(rows):
        temperature, min_p = pick(0.0, 0.5, 1.0, 2.0), pick(0.0, 0.0, 0.1)
        settings.set_row(row, temperature, pick(0, 1, 50, 5000), pick(1.0, 0.9, 0.1), min_p)
    uniforms = torch.rand(rows, generator=generator)
    assert_drawn(draw(logits, settings, uniforms), logits, settings, uniforms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_at_the_threshold_are_all_kept(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 2.0, -0.0, 5.0, 0.0, -3.0, 2.0]], dtype=dtype).repeat(7, 1)
    uniforms = torch.arange(7) / 7 + 0.01
    for k, kept in ((2, {1, 3, 6}), (4, {0, 1, 2, 3, 4, 6})):
        settings = Settings(7, t=50.0, k=k)
        tokens = draw(logits, settings, uniforms)
        assert set(tokens.tolist()) == kept
        assert_drawn(tokens, logits, settings, uniforms)


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((3, CHUNK + 100), float("-inf"))
    logits[0, CHUNK + 7] = -1e30
    logits[1, [3, 90, CHUNK + 99]] = torch.tensor([1.0, 1.0, 1.0])
    logits[2, 5] = 3e38
    settings = Settings(3, k=50, p=0.999)
    tokens = draw(logits, settings, torch.tensor([0.5, 0.999999, 0.0]))
    assert tokens.tolist() == [CHUNK + 7, CHUNK + 99, 5]


def test_numbers_at_both_ends_draw_the_first_and_the_last_token_kept() -> None:
    logits = torch.zeros(2, 2 * CHUNK)
    logits[:, [0, 2 * CHUNK - 1]] = -50.0  # weights that vanish in a sum, yet are not zero
    settings = Settings(2, min_p=0.5)
    almost_one = 1.0 - 2.0**-24
    tokens = draw(logits, settings, torch.tensor([0.0, almost_one]))
    assert tokens[0] == 1
    assert 2 * CHUNK - 4 <= tokens[1] <= 2 * CHUNK - 2


def test_searches_may_be_left_out_where_no_row_needs_them() -> None:
    logits, uniforms = torch.randn(2, 200), torch.tensor([0.3, 0.8])
    logits = logits.to(torch.bfloat16)
    for options, use in (({"k": 9}, {"use_top_p": False}), ({"p": 0.5}, {"use_top_k": False})):
        settings = Settings(2, **options)
        expected = draw(logits, settings, uniforms)
        assert torch.equal(draw(logits, settings, uniforms, **use), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_largest(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 2 * CHUNK + 5).to(dtype)
    logits[0, [17, 30, CHUNK + 2]] = 100.0
    logits[1, [CHUNK, 2 * CHUNK + 4]] = 100.0
    out = torch.full((3,), -7, dtype=torch.int32)
    assert greedy(strided(logits), out=out, workspace=workspace(*logits.shape)) is out
    assert out.tolist() == [17, CHUNK, int(logits[2].to(torch.float32).numpy().argmax())]
    settings = Settings(3, t=0.0, k=2, p=0.5)
    assert torch.equal(draw(logits, settings, torch.rand(3)), out.to(torch.int64))


def test_no_rows_is_no_launch_and_a_large_vocabulary_is_refused() -> None:
    out = torch.empty(0, dtype=torch.int64)
    room = workspace(1, 50)
    none = torch.empty(0, 50)
    assert sample(none, *Settings(0).values, torch.empty(0), out=out, workspace=room) is out
    assert greedy(none, out=out, workspace=room) is out
    with pytest.raises(ValueError, match="larger than"):
        SampleWorkspace.allocate(CPU, max_rows=1, vocabulary=MAX_CHUNKS * 64 + 1, chunk=64)
