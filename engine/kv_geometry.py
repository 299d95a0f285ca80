"""The KV cache that a configuration asks for, and what two workers' must have in common."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from engine.backend import KVCacheSpec, KVDtype
from engine.model_config import ModelConfig
from engine.tensor_parallel.shard import ModelShard
from mesh.config import WorkerConfig
from mesh.errors import ConfigError
from mesh.messages import PROTOCOL_VERSION

_MIB = 1 << 20


def longest_sequence(config: WorkerConfig, model: ModelConfig) -> int:
    """Positions that a sequence may take.

    Raises:
        ConfigError: more are asked for than the model was made for.
    """
    if config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is over the model's "
            f"{model.max_position_embeddings}"
        )
    return config.max_model_len or model.max_position_embeddings


def kv_spec(
    config: WorkerConfig, model: ModelConfig, shard: ModelShard, default_dtype: KVDtype
) -> KVCacheSpec:
    """This rank's cache, of as many blocks as the configuration says.

    Raises:
        ConfigError: the memory holds no block.
    """
    spec = KVCacheSpec(
        num_blocks=config.kv_blocks or 1,
        num_layers=model.num_layers,
        num_kv_heads=len(shard.kv_heads),
        block_size=config.block_size,
        head_dim=model.head_dim,
        dtype=default_dtype if config.kv_dtype == "auto" else config.kv_dtype,
    )
    if config.kv_blocks:
        return spec
    num_blocks = config.kv_memory_mib * _MIB // shard.size // spec.block_bytes
    if num_blocks < 1:
        shared = f" for each of {shard.size} ranks" if shard.size > 1 else ""
        raise ConfigError(
            f"kv_memory_mib {config.kv_memory_mib} holds no block of {spec.block_bytes} bytes"
            + shared
        )
    return replace(spec, num_blocks=num_blocks)


def fingerprint(model: ModelConfig, weights_hash: str, spec: KVCacheSpec, kv_layout: str) -> str:
    """Hash of everything that must be equal for two workers to exchange KV blocks.

    Not of the number of ranks: workers of different ones exchange heads.
    """
    parts: list[object] = [
        PROTOCOL_VERSION, kv_layout, model, weights_hash,
        spec.num_layers, model.num_kv_heads, spec.block_size, spec.head_dim, spec.dtype,
    ]  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
