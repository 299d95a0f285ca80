"""GGML storage types → float32.

The types of the default model have their own path (half the time of ``gguf.quants``, same bits);
all others go through ``gguf.quants``. Numpy on purpose: torch would split each of these small
operations over its threads, and where other processes hold the cores the threads wait for each
other at every one of them (measured: 14–33 s instead of 0.5–2.5 s for the default model with three
busy processes on two cores).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from mesh.errors import ConfigError

_Type = GGMLQuantizationType
_Floats = npt.NDArray[np.float32]
_Blocks = npt.NDArray[np.uint8]
_PLAIN = (_Type.F32, _Type.F16, _Type.BF16)
_SUPPORTED = {
    *_PLAIN,
    *(_Type.Q4_0, _Type.Q4_1, _Type.Q5_0, _Type.Q5_1, _Type.Q8_0),
    *(_Type.Q2_K, _Type.Q3_K, _Type.Q4_K, _Type.Q5_K, _Type.Q6_K),
    *(_Type.IQ1_S, _Type.IQ1_M, _Type.IQ2_XXS, _Type.IQ2_XS, _Type.IQ2_S),
    *(_Type.IQ3_XXS, _Type.IQ3_S, _Type.IQ4_NL, _Type.IQ4_XS),
    *(_Type.TQ1_0, _Type.TQ2_0, _Type.MXFP4),
}
_BLOCK_SIZE = 32  # of Q4_0, Q4_1 and Q8_0
_CHUNK_BLOCKS = 4096  # decoded at a time, so that intermediate values stay in the cache


def storage_bytes(ggml_type: int, shape: tuple[int, ...]) -> int:
    """Bytes that a tensor of ``shape`` occupies.

    Raises:
        ConfigError: The type is not supported or the rows are not whole blocks.
    """
    if ggml_type not in _SUPPORTED:
        raise ConfigError(f"GGML storage type {ggml_type} is not supported")
    block_size, block_bytes = GGML_QUANT_SIZES[_Type(ggml_type)]
    if shape[-1] % block_size:
        raise ConfigError(f"rows of {shape[-1]} are not whole blocks of {block_size}")
    num_elements = 1
    for dim in shape:
        num_elements *= dim
    return num_elements // block_size * int(block_bytes)


def covering_blocks(
    raw: bytearray, ggml_type: int, shape: tuple[int, int], left: int, right: int
) -> tuple[int, int, bytearray]:
    """The blocks of every row that hold columns ``left`` to ``right`` (exclusive).

    Returns:
        The first column of them, the one behind the last, and their bytes, row by row.
    """
    block_size, block_bytes = GGML_QUANT_SIZES[_Type(ggml_type)]
    first, last = left // block_size, -(-right // block_size)
    blocks = np.frombuffer(raw, np.uint8).reshape(shape[0], -1, int(block_bytes))
    part = bytearray(np.ascontiguousarray(blocks[:, first:last]))
    return first * block_size, last * block_size, part


def dequantize(raw: bytearray, ggml_type: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Decode the stored bytes of a tensor to float32.

    Args:
        raw: Exactly ``storage_bytes(ggml_type, shape)`` bytes; the result may share them.
        ggml_type: One that ``storage_bytes`` accepts.
        shape: Outermost first.
    """
    assert len(raw) == storage_bytes(ggml_type, shape)
    # a damaged file's scales may be infinite or NaN: the values are then what the file says
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.from_numpy(_decode(raw, _Type(ggml_type), shape)).view(shape)


def _decode(raw: bytearray, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> _Floats:
    if kind in _PLAIN:
        values = _plain(raw, kind)
    elif kind in _DECODERS:
        blocks = np.frombuffer(raw, dtype=np.uint8).reshape(-1, int(GGML_QUANT_SIZES[kind][1]))
        values = np.empty((len(blocks), _BLOCK_SIZE), dtype=np.float32)
        for start in range(0, len(blocks), _CHUNK_BLOCKS):
            end = start + _CHUNK_BLOCKS
            _DECODERS[kind](blocks[start:end], values[start:end])
    else:
        rows = np.frombuffer(raw, dtype=np.uint8).reshape(*shape[:-1], -1)
        values = np.ascontiguousarray(gguf_dequantize(rows, kind), dtype=np.float32)
    return values


def _plain(raw: bytearray, kind: GGMLQuantizationType) -> _Floats:
    if kind == _Type.F32:
        return np.frombuffer(raw, dtype=np.float32)
    if kind == _Type.F16:
        return np.frombuffer(raw, dtype=np.float16).astype(np.float32)
    bits = np.frombuffer(raw, dtype=np.uint16).astype(np.uint32)  # bfloat16: the upper half
    return (bits << 16).view(np.float32)


def _half(blocks: _Blocks, first: int) -> _Floats:
    """Float16 at byte ``first`` of each block, as float32 ``[num_blocks, 1]``."""
    bits = np.ascontiguousarray(blocks[:, first : first + 2])
    return bits.view(np.float16).astype(np.float32)


def _nibbles(packed: _Blocks) -> npt.NDArray[Any]:
    """Low nibbles, then high nibbles of 16 bytes: ``[num_blocks, 32]``."""
    out = np.empty((len(packed), 2, _BLOCK_SIZE // 2), dtype=np.uint8)
    np.bitwise_and(packed, 15, out=out[:, 0])
    np.right_shift(packed, 4, out=out[:, 1])
    return out.reshape(len(packed), _BLOCK_SIZE)


def _q4_0(blocks: _Blocks, out: _Floats) -> None:
    # d f16 | 32 x 4 bit:  (q - 8) * d
    np.multiply(_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8), _half(blocks, 0), out=out)


def _q4_1(blocks: _Blocks, out: _Floats) -> None:
    # d f16 | m f16 | 32 x 4 bit:  q * d + m
    np.multiply(_nibbles(blocks[:, 4:]), _half(blocks, 0), out=out)
    out += _half(blocks, 2)


def _q8_0(blocks: _Blocks, out: _Floats) -> None:
    # d f16 | 32 x int8:  q * d
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out)


_DECODERS = {_Type.Q4_0: _q4_0, _Type.Q4_1: _q4_1, _Type.Q8_0: _q8_0}
