"""GGML storage types → float32.

The types of the default model have a torch path (half the time of ``gguf.quants``, same bits); all
others go through ``gguf.quants``.
"""

from __future__ import annotations

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from mesh.errors import ConfigError

_Type = GGMLQuantizationType
_PLAIN = {
    _Type.F32: torch.float32,
    _Type.F16: torch.float16,
    _Type.BF16: torch.bfloat16,
}
_SUPPORTED = {
    *_PLAIN,
    *(_Type.Q4_0, _Type.Q4_1, _Type.Q5_0, _Type.Q5_1, _Type.Q8_0),
    *(_Type.Q2_K, _Type.Q3_K, _Type.Q4_K, _Type.Q5_K, _Type.Q6_K),
    *(_Type.IQ1_S, _Type.IQ1_M, _Type.IQ2_XXS, _Type.IQ2_XS, _Type.IQ2_S),
    *(_Type.IQ3_XXS, _Type.IQ3_S, _Type.IQ4_NL, _Type.IQ4_XS),
    *(_Type.TQ1_0, _Type.TQ2_0, _Type.MXFP4),
}
_HALF_BLOCK = 16


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


def dequantize(raw: bytearray, ggml_type: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Decode the stored bytes of a tensor to float32.

    Args:
        raw: Exactly ``storage_bytes(ggml_type, shape)`` bytes; the result may share them.
        ggml_type: One that ``storage_bytes`` accepts.
        shape: Outermost first.
    """
    assert len(raw) == storage_bytes(ggml_type, shape)
    kind = _Type(ggml_type)
    if kind in _PLAIN:
        return torch.frombuffer(raw, dtype=_PLAIN[kind]).to(torch.float32).view(shape)
    block_bytes = int(GGML_QUANT_SIZES[kind][1])
    if kind in (_Type.Q4_0, _Type.Q4_1, _Type.Q8_0):
        blocks = torch.frombuffer(raw, dtype=torch.uint8).view(-1, block_bytes)
        decode = {_Type.Q4_0: _q4_0, _Type.Q4_1: _q4_1, _Type.Q8_0: _q8_0}[kind]
        return decode(blocks).view(shape)
    rows = np.frombuffer(raw, dtype=np.uint8).reshape(*shape[:-1], -1)
    values = np.ascontiguousarray(gguf_dequantize(rows, kind), dtype=np.float32)
    return torch.from_numpy(values).view(shape)


def _halves(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """Float16 at byte ``first`` of each block, as float32 ``[num_blocks, 1]``."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Low nibbles then high nibbles of 16 bytes, as float32 ``[num_blocks, 32]``."""
    out = torch.empty(packed.shape[0], 2 * _HALF_BLOCK)
    out[:, :_HALF_BLOCK] = packed & 15
    out[:, _HALF_BLOCK:] = packed >> 4
    return out


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    # d f16 | 32 x 4 bit:  (q - 8) * d
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_halves(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    # d f16 | m f16 | 32 x 4 bit:  q * d + m
    return _nibbles(blocks[:, 4:]).mul_(_halves(blocks, 0)).add_(_halves(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    # d f16 | 32 x int8:  q * d
    return blocks[:, 2:].view(torch.int8) * _halves(blocks, 0)
