"""Compressed KV: within half a step, in place, and never for what it can't hold."""

from __future__ import annotations

import numpy as np
import pytest

from kvtransfer.memory.compression import GROUP, decode_segments, encode_segments, encoded_size

STRIDE = GROUP * 4 * 3


@pytest.mark.parametrize(
    ("element", "stride", "num_bytes"),
    [("float32", 384, 108), ("float16", 384, 216), ("bfloat16", 128, 72)],
)
def test_sizes(element: str, stride: int, num_bytes: int) -> None:
    size = encoded_size(stride, element)
    assert size is not None
    assert (size.stride, size.num_bytes) == (stride, num_bytes)


@pytest.mark.parametrize(("element", "stride"), [("", 384), ("float16", 100), ("int8", 384)])
def test_what_can_not_be_compressed(element: str, stride: int) -> None:
    assert encoded_size(stride, element) is None


def test_round_trip_against_float64() -> None:
    rng = np.random.default_rng()
    pool = rng.standard_normal((8, STRIDE // 4)).astype(np.float32)
    pool[1] *= 1e30
    pool[2] *= 1e-30
    pool[3, :GROUP] = 0
    before = pool.copy()
    flat = pool.view(np.uint8).reshape(-1)
    assert encode_segments(flat, [0, 1, 2, 3], STRIDE, "float32", [4, 5, 6, 7])
    assert (pool[:4] == before[:4]).all()
    decode_segments(flat, [4, 5, 6, 7], STRIDE, "float32")
    groups = before[:4].astype(np.float64).reshape(-1, GROUP)
    steps = np.abs(groups).max(axis=1, keepdims=True) / 127
    error = np.abs(pool[4:].astype(np.float64).reshape(-1, GROUP) - groups)
    assert (error <= steps * 0.5001).all()
    assert (pool[7, :GROUP] == 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_not_compressed(value: float) -> None:
    pool = np.ones((2, STRIDE // 4), np.float32)
    pool[0, 5] = value
    assert not encode_segments(pool.view(np.uint8).reshape(-1), [0], STRIDE, "float32", [1])
