"""The vectorised generator is numpy's."""

from __future__ import annotations

import numpy as np

from engine.philox import uniforms
from engine.sampler import uniform


def test_numbers_equal_numpys_bit_for_bit() -> None:
    rng = np.random.default_rng(3)
    seeds = rng.integers(0, 1 << 64, 300, dtype=np.uint64)
    seeds[:4] = [0, 1, (1 << 64) - 1, 1 << 63]
    indices = rng.integers(0, 1 << 40, 300)
    indices[:6] = [0, 1, 2, (1 << 32) - 2, (1 << 32) - 1, 1 << 32]
    expected = [uniform(int(seed), int(i)) for seed, i in zip(seeds, indices, strict=True)]
    assert uniforms(seeds, indices).tolist() == expected


def test_no_rows_give_no_numbers() -> None:
    assert uniforms([], []).shape == (0,)
