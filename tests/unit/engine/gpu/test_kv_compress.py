"""KV compressed by the GPU is what the wire format says, and expands to what it stood for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.backends.gpu.kernels.transfer.kv_compress import (
    GROUP,
    encoded_bytes,
    kv_compress,
    kv_expand,
    reference,
)
from kvtransfer.memory import compression as encoding
from tests.unit.engine.gpu.paged_cache import ACTIVATION

NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
NUM_SEGMENTS = 5
IDS = torch.tensor([4, 0, 3])
TO = torch.tensor([1, 2, 0])
EPSILON = {"fp32": 2**-24, "fp16": 2**-11, "bf16": 2**-8}


def random_segments(num_elements: int, dtype: str, *, spare: int = 0) -> torch.Tensor:
    """Groups of very different size, one of zeros; rows ``spare`` elements apart."""
    generator = torch.Generator().manual_seed(num_elements)
    rows = torch.randn(NUM_SEGMENTS, num_elements + spare, generator=generator)
    sizes = torch.rand(NUM_SEGMENTS, num_elements // GROUP, 1, generator=generator) * 12 - 6
    segments = rows[:, :num_elements]
    segments.copy_((segments.reshape(NUM_SEGMENTS, -1, GROUP) * sizes.exp()).view(segments.shape))
    segments[IDS[0], :GROUP] = 0
    return rows.to(ACTIVATION[dtype])[:, :num_elements]


def compressed(segments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = encoded_bytes(segments.shape[1])
    encoded = torch.full((4, size + 16), 0xA5, dtype=torch.uint8)
    not_finite = torch.zeros(1, dtype=torch.int32)
    kv_compress(segments, IDS, encoded[:, :size], TO, not_finite)
    assert (encoded[:, size:] == 0xA5).all()
    assert (encoded[3] == 0xA5).all()
    return encoded[:, :size], not_finite


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("num_elements", [32, 96, 2048, 2048 + 64])
@pytest.mark.parametrize("spare", [0, 16])
def test_segments_become_steps_and_scales(dtype: str, num_elements: int, spare: int) -> None:
    segments = random_segments(num_elements, dtype, spare=spare)
    encoded, not_finite = compressed(segments)
    steps, scales = reference(segments[IDS])
    found = encoded[TO, :num_elements].view(torch.int8).double()
    found_scales = encoded[TO][:, num_elements:].contiguous().view(torch.float32).double()
    torch.testing.assert_close(found_scales, scales, rtol=1e-7, atol=0)
    assert (found - steps).abs().max() <= 1  # only where a value lies between two steps
    exact = segments[IDS].double()
    error = (found * found_scales.repeat_interleave(GROUP, 1) - exact).abs()
    assert (error <= 0.5001 * scales.repeat_interleave(GROUP, 1)).all()
    assert not_finite.item() == 0


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_segments_expand_on_a_gpu_as_on_a_cpu(dtype: str) -> None:
    num_elements = 96
    segments = random_segments(num_elements, dtype)
    encoded, _ = compressed(segments)
    width = segments.element_size()
    pool = np.zeros((NUM_SEGMENTS, num_elements * width), np.uint8)
    pool[: len(encoded), : encoded.shape[1]] = encoded.numpy()
    encoding.decode_segments(pool.reshape(-1), TO.tolist(), num_elements * width, NAMES[dtype])
    expected = torch.from_numpy(pool).view(segments.dtype)
    out = torch.full((NUM_SEGMENTS, num_elements), torch.nan, dtype=segments.dtype)
    kv_expand(encoded, TO, out, IDS)
    assert torch.equal(out[IDS], expected[TO])
    assert out[[1, 2]].isnan().all()


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_gpu_expands_what_a_cpu_compressed(dtype: str) -> None:
    num_elements = 96
    segments = random_segments(num_elements, dtype)
    raw = segments.contiguous().view(torch.uint8)
    pool = torch.cat([raw, raw]).numpy()
    stride = num_elements * segments.element_size()
    places = [NUM_SEGMENTS + place for place in TO.tolist()]
    assert encoding.encode_segments(pool.reshape(-1), IDS.tolist(), stride, NAMES[dtype], places)
    encoded = torch.from_numpy(pool)[:, : encoded_bytes(num_elements)]
    out = torch.full((NUM_SEGMENTS, num_elements), torch.nan, dtype=segments.dtype)
    kv_expand(encoded, torch.tensor(places), out, IDS)
    _, scales = reference(segments[IDS])
    error = (out[IDS].double() - segments[IDS].double()).abs()
    bound = 0.5001 * scales.repeat_interleave(GROUP, 1)
    assert (error <= bound + EPSILON[dtype] * out[IDS].double().abs()).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_told(value: float) -> None:
    segments = random_segments(2048 + 64, "bf16")
    segments[1, 3] = value  # not asked for
    assert compressed(segments)[1].item() == 0
    segments[IDS[2], 2048 + 5] = value
    assert compressed(segments)[1].item() == 1


@pytest.mark.parametrize("magnitude", [1e-40, 1e-30, 3e38])
def test_groups_of_any_magnitude(magnitude: float) -> None:
    segments = torch.full((NUM_SEGMENTS, GROUP), magnitude)
    encoded, not_finite = compressed(segments)
    out = torch.empty_like(segments)
    kv_expand(encoded, TO, out, IDS)
    torch.testing.assert_close(out[IDS], segments[IDS], rtol=1e-6, atol=1e-37)
    assert not_finite.item() == 0


def test_segments_of_no_whole_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="no whole groups"):
        encoded_bytes(33)
