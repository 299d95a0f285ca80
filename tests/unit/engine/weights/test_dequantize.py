"""Decoded blocks are those of the gguf package, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from engine.weights.dequantize import _SUPPORTED, dequantize, storage_bytes
from mesh.errors import ConfigError

_SHAPE = (3, 5, 512)


@pytest.mark.parametrize("kind", sorted(_SUPPORTED), ids=lambda kind: kind.name)
def test_any_bytes(kind: gguf.GGMLQuantizationType) -> None:
    num_bytes = storage_bytes(kind, _SHAPE)
    raw = np.random.default_rng().integers(0, 256, num_bytes, dtype=np.uint8)
    rows = raw.reshape(*_SHAPE[:-1], -1)
    with np.errstate(all="ignore"):  # random scales: infinities and NaN too
        wanted = gguf.quants.dequantize(rows, kind)
    ours = dequantize(bytearray(raw), int(kind), _SHAPE)
    assert ours.dtype == torch.float32
    assert ours.shape == _SHAPE
    np.testing.assert_array_equal(ours.numpy(), wanted.reshape(_SHAPE))


def test_stays_writable() -> None:
    """The result is the caller's: writing to it must not warn or fail."""
    raw = bytearray(np.arange(4, dtype=np.float32).tobytes())
    assert dequantize(raw, gguf.GGMLQuantizationType.F32, (4,)).add_(1).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.I32, 4, 5, 999, 2**32 - 1])
def test_unsupported_type(kind: int) -> None:
    with pytest.raises(ConfigError, match="not supported"):
        storage_bytes(kind, (32,))


def test_rows_are_whole_blocks() -> None:
    with pytest.raises(ConfigError, match="whole blocks"):
        storage_bytes(gguf.GGMLQuantizationType.Q4_1, (2, 48))
