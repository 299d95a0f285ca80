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
NUM_PIECES = 5
IDS = torch.tensor([4, 0, 3])
TO = torch.tensor([1, 2, 0])
EPSILON = {"fp32": 2**-24, "fp16": 2**-11, "bf16": 2**-8}


def random_pieces(num_elements: int, dtype: str, *, spare: int = 0) -> torch.Tensor:
    """Groups of very different size, one of zeros; rows ``spare`` elements apart."""
    generator = torch.Generator().manual_seed(num_elements)
    rows = torch.randn(NUM_PIECES, num_elements + spare, generator=generator)
    sizes = torch.rand(NUM_PIECES, num_elements // GROUP, 1, generator=generator) * 12 - 6
    pieces = rows[:, :num_elements]
    pieces.copy_((pieces.reshape(NUM_PIECES, -1, GROUP) * sizes.exp()).view(pieces.shape))
    pieces[IDS[0], :GROUP] = 0
    return rows.to(ACTIVATION[dtype])[:, :num_elements]


def compressed(pieces: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = encoded_bytes(pieces.shape[1])
    encoded = torch.full((4, size + 16), 0xA5, dtype=torch.uint8)
    not_finite = torch.zeros(1, dtype=torch.int32)
    kv_compress(pieces, IDS, encoded[:, :size], TO, not_finite)
    assert (encoded[:, size:] == 0xA5).all()
    assert (encoded[3] == 0xA5).all()
    return encoded[:, :size], not_finite


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("num_elements", [32, 96, 2048, 2048 + 64])
@pytest.mark.parametrize("spare", [0, 16])
def test_pieces_become_steps_and_scales(dtype: str, num_elements: int, spare: int) -> None:
    pieces = random_pieces(num_elements, dtype, spare=spare)
    encoded, not_finite = compressed(pieces)
    steps, scales = reference(pieces[IDS])
    found = encoded[TO, :num_elements].view(torch.int8).double()
    found_scales = encoded[TO][:, num_elements:].contiguous().view(torch.float32).double()
    torch.testing.assert_close(found_scales, scales, rtol=1e-7, atol=0)
    assert (found - steps).abs().max() <= 1  # only where a value lies between two steps
    exact = pieces[IDS].double()
    error = (found * found_scales.repeat_interleave(GROUP, 1) - exact).abs()
    assert (error <= 0.5001 * scales.repeat_interleave(GROUP, 1)).all()
    assert not_finite.item() == 0


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_pieces_expand_on_a_gpu_as_on_a_cpu(dtype: str) -> None:
    num_elements = 96
    pieces = random_pieces(num_elements, dtype)
    encoded, _ = compressed(pieces)
    width = pieces.element_size()
    pool = np.zeros((NUM_PIECES, num_elements * width), np.uint8)
    pool[: len(encoded), : encoded.shape[1]] = encoded.numpy()
    encoding.decode_pieces(pool.reshape(-1), TO.tolist(), num_elements * width, NAMES[dtype])
    expected = torch.from_numpy(pool).view(pieces.dtype)
    out = torch.full((NUM_PIECES, num_elements), torch.nan, dtype=pieces.dtype)
    kv_expand(encoded, TO, out, IDS)
    assert torch.equal(out[IDS], expected[TO])
    assert out[[1, 2]].isnan().all()


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_gpu_expands_what_a_cpu_compressed(dtype: str) -> None:
    num_elements = 96
    pieces = random_pieces(num_elements, dtype)
    raw = pieces.contiguous().view(torch.uint8)
    pool = torch.cat([raw, raw]).numpy()
    stride = num_elements * pieces.element_size()
    places = [NUM_PIECES + place for place in TO.tolist()]
    assert encoding.encode_pieces(pool.reshape(-1), IDS.tolist(), stride, NAMES[dtype], places)
    encoded = torch.from_numpy(pool)[:, : encoded_bytes(num_elements)]
    out = torch.full((NUM_PIECES, num_elements), torch.nan, dtype=pieces.dtype)
    kv_expand(encoded, torch.tensor(places), out, IDS)
    _, scales = reference(pieces[IDS])
    error = (out[IDS].double() - pieces[IDS].double()).abs()
    bound = 0.5001 * scales.repeat_interleave(GROUP, 1)
    assert (error <= bound + EPSILON[dtype] * out[IDS].double().abs()).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_told(value: float) -> None:
    pieces = random_pieces(2048 + 64, "bf16")
    pieces[1, 3] = value  # not asked for
    assert compressed(pieces)[1].item() == 0
    pieces[IDS[2], 2048 + 5] = value
    assert compressed(pieces)[1].item() == 1


@pytest.mark.parametrize("magnitude", [1e-40, 1e-30, 3e38])
def test_groups_of_any_magnitude(magnitude: float) -> None:
    pieces = torch.full((NUM_PIECES, GROUP), magnitude)
    encoded, not_finite = compressed(pieces)
    out = torch.empty_like(pieces)
    kv_expand(encoded, TO, out, IDS)
    torch.testing.assert_close(out[IDS], pieces[IDS], rtol=1e-6, atol=1e-37)
    assert not_finite.item() == 0


def test_pieces_of_no_whole_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="no whole groups"):
        encoded_bytes(33)
