"""How much memory a model's weights will take, told from its configuration alone."""

from __future__ import annotations

import math

from engine.model_config import ModelConfig
from engine.weights.expected_tensors import expected_tensors

MATRIX_BITS = {"fp32": 32.0, "bf16": 16.0, "fp16": 16.0, "int8": 8.0, "w8a8": 8.0, "int4": 4.125}
"""Of an element, by weight scheme: the smallest form of it that a device stores. int4: a 16-bit
scale for each 128."""
_LEAST_TABLE_BITS = 8.0
"""Of embedding and head."""
_VECTOR_BITS = 16.0
_TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def least_weight_bytes(config: ModelConfig, weights: str, num_ranks: int = 1) -> int:
    """A lower bound, close to it, of the bytes that one rank's weights take on any device.

    Args:
        config: the model.
        weights: the scheme, not ``auto``.
        num_ranks: processes that share the model's matrices; heads that cannot be divided further
            are on several of them.
    """
    bits = 0.0
    for name, shape in expected_tensors(config):
        size = math.prod(shape)
        if name in _TABLES:
            bits += size * max(_LEAST_TABLE_BITS, MATRIX_BITS[weights]) / num_ranks
        elif len(shape) == 1 or name.endswith("mlp.gate.weight"):
            bits += size * _VECTOR_BITS
        elif name.endswith(("k_proj.weight", "v_proj.weight")):
            bits += size * MATRIX_BITS[weights] / min(num_ranks, config.num_kv_heads)
        else:
            bits += size * MATRIX_BITS[weights] / num_ranks
    return math.floor(bits / 8)
