"""Products with packed int4 and int8 weights: every tile path, ragged edges, strides, splits."""

from __future__ import annotations

import pytest
import torch

from engine.backends.gpu.kernels.linear import int4_matmul, int8_matmul
from engine.backends.gpu.kernels.linear.packed_matmul import SplitWorkspace
from engine.backends.gpu.kernels.linear.packed_weights import pack, unit_of, unpack

# of a sum of K products whose operands are exact in the type: rounding of the result alone
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


def activations(m: int, k: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[m, k] rows of a wider tensor, with NaN beside them."""
    wide = torch.full((m, k + 48), float("nan"), dtype=dtype)
    x = wide[:, 16 : 16 + k]
    x.copy_(torch.randn(m, k, generator=torch.Generator().manual_seed(seed)))
    return x


def poisoned(m: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Strided output rows."""
    return torch.full((m, n + 16), float("nan"), dtype=dtype)[:, :n]


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the type's rounding of the largest value of the row."""
    largest = expected.abs().amax(dim=1, keepdim=True)
    error = (out.to(torch.float64) - expected).abs() / largest.clamp(min=1e-30)
    assert float(error.max()) <= TOLERANCE[out.dtype]  # NaN fails


def int4_case(m: int, n: int, k: int, group: int, dtype: torch.dtype, **options: object) -> None:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n))
    values, scales = int4_matmul.quantise(weight, group)
    packed = int4_matmul.pack(values, 4)
    bias = torch.randn(n) if options.pop("bias", False) else None
    x = activations(m, k, dtype, seed=m)
    out = poisoned(m, n, dtype)
    assert int4_matmul.int4_matmul(x, packed, scales, bias, out=out, **options) is out
    expected = int4_matmul.reference(x.to(torch.float64), packed, scales, bias)
    assert_close(out, expected)


def int8_case(m: int, n: int, k: int, dtype: torch.dtype, **options: object) -> None:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n))
    values, scales = int8_matmul.quantise(weight)
    packed = int8_matmul.pack(values, 8)
    bias = torch.randn(n).to(dtype) if options.pop("bias", False) else None
    x = activations(m, k, dtype, seed=m)
    out = poisoned(m, n, dtype)
    assert int8_matmul.int8_matmul(x, packed, scales, bias, out=out, **options) is out
    expected = int8_matmul.reference(x.to(torch.float64), packed, scales, bias)
    assert_close(out, expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("k", [1, 64, 100, 256])
def test_packing_is_undone_by_unpacking(bits: int, k: int) -> None:
    limit = 1 << (bits - 1)
    values = torch.randint(-limit, limit, (5, k), dtype=torch.int8)
    words = pack(values, bits)
    assert words.shape == (-(-k // unit_of(bits)), 5, 16)
    assert torch.equal(unpack(words, bits, k), values)


def test_the_bits_of_an_int4_word_lie_as_documented() -> None:
    values = torch.zeros(1, 128, dtype=torch.int8)
    for bits, k in ((0, 6), (4, 38), (8, 70), (12, 102), (16, 7), (20, 39), (24, 71), (28, 103)):
        values.zero_()
        values[0, k] = 5
        assert int(pack(values, 4)[0, 0, 3]) == 5 << bits


def test_values_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit 4 bits"):
        pack(torch.tensor([[8]], dtype=torch.int8), 4)
    with pytest.raises(ValueError, match="whole groups"):
        int4_matmul.quantise(torch.zeros(1, 100), 64)
    with pytest.raises(ValueError, match="too large"):
        int4_matmul.quantise(torch.full((1, 32), 1e9), 32)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("scale", [1e-7, 1.0, 1e4])
def test_int4_error_is_at_most_half_a_step(group: int, scale: float) -> None:
    weight = torch.randn(7, 256) * scale
    weight[3] = 0.0
    values, scales = int4_matmul.quantise(weight, group)
    steps = scales.T.to(torch.float32).repeat_interleave(group, dim=1)
    error = (values * steps - weight).abs()
    smallest_float16 = 2.0**-24  # a scale below it is none, and half of it is lost on each of 7
    assert bool((error <= steps * 0.51 + 4 * smallest_float16).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_types_and_groups(dtype: torch.dtype, group: int) -> None:
    int4_case(3, 130, 256, group, dtype)


@pytest.mark.parametrize("m", [1, 9, 33, 80])
def test_int4_paths_by_number_of_tokens(m: int) -> None:
    int4_case(m, 48, 128, 64, torch.float16, bias=True)


@pytest.mark.parametrize("k", [32, 96, 160])
def test_int4_sizes_that_are_not_whole_units(k: int) -> None:
    int4_case(2, 20, k, 32, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_int8_types(dtype: torch.dtype) -> None:
    int8_case(3, 130, 128, dtype, bias=True)


@pytest.mark.parametrize("m", [1, 9, 33, 150])
def test_int8_paths_by_number_of_tokens(m: int) -> None:
    int8_case(m, 144, 64, torch.float16)


@pytest.mark.parametrize("k", [3, 63, 65, 100])
def test_int8_sizes_that_are_not_whole_units(k: int) -> None:
    int8_case(2, 20, k, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bits", [4, 8])
def test_dequantisation_is_exact_for_every_value(dtype: torch.dtype, bits: int) -> None:
    limit = 1 << (bits - 1)
    values = torch.arange(-limit, limit).to(torch.int8).repeat(128)[: 256 * 128].view(-1, 128)
    values = values[: 256 if bits == 8 else 16]
    n = len(values)
    x = torch.eye(128, dtype=dtype)[:16] if bits == 4 else torch.eye(128, dtype=dtype)[64:80]
    out = poisoned(16, n, dtype)
    if bits == 4:
        scales = torch.ones(1, n, dtype=torch.float16)
        int4_matmul.int4_matmul(x, pack(values, 4), scales, None, out=out)
    else:
        int8_matmul.int8_matmul(x, pack(values, 8), torch.ones(n), None, out=out)
    expected = x.to(torch.float64) @ values.T.to(torch.float64)
    assert torch.equal(out.to(torch.float64), expected)


@pytest.mark.parametrize("num_splits", [2, 3, 5, 100])
@pytest.mark.parametrize("bits", [4, 8])
def test_split_sums_are_exact_and_leave_the_workspace_ready(num_splits: int, bits: int) -> None:
    workspace = SplitWorkspace.allocate(torch.device("cpu"), elements=1 << 16, tiles=8)
    for seed_m in (1, 4):
        workspace.partials.fill_(float("nan"))
        options = {"workspace": workspace, "num_splits": num_splits, "bias": True}
        if bits == 4:
            int4_case(seed_m, 200, 640, 64, torch.float32, **options)
        else:
            int8_case(seed_m, 200, 320, torch.float32, **options)
        assert not workspace.arrivals.any()
        assert not torch.isnan(workspace.partials[: 200 * seed_m * 2]).any()


def test_a_split_result_does_not_vary() -> None:
    workspace = SplitWorkspace.allocate(torch.device("cpu"), elements=1 << 16, tiles=8)
    values, scales = int4_matmul.quantise(torch.randn(64, 1024), 128)
    packed = int4_matmul.pack(values, 4)
    x = torch.randn(2, 1024)
    first, second = (
        int4_matmul.int4_matmul(
            x, packed, scales, None, out=poisoned(2, 64, x.dtype), workspace=workspace, num_splits=4
        )
        for _ in range(2)
    )
    assert torch.equal(first, second)


def test_a_workspace_that_is_too_small_only_splits_less() -> None:
    small = SplitWorkspace.allocate(torch.device("cpu"), elements=2 * 200, tiles=2)
    int8_case(1, 200, 320, torch.float32, workspace=small, num_splits=5)
    assert not torch.isnan(small.partials).any()
    int8_case(4, 200, 320, torch.float32, workspace=small, num_splits=5)


def test_no_tokens_is_no_launch() -> None:
    values, scales = int8_matmul.quantise(torch.randn(8, 64))
    out = torch.empty(0, 8)
    int8_matmul.int8_matmul(torch.empty(0, 64), pack(values, 8), scales, None, out=out)
