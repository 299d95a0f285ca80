"""Which tensors a configuration calls for."""

from __future__ import annotations

from collections.abc import Iterator

from engine.model_config import ModelConfig
from engine.weights.source import WeightSource
from mesh.errors import ConfigError


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor of the model, in the order a forward pass needs them."""
    hidden = (config.hidden_size,)
    yield "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", hidden
        for name, shape in _attention(config):
            yield f"{prefix}self_attn.{name}", shape
        yield f"{prefix}post_attention_layernorm.weight", hidden
        if config.post_norms:
            yield f"{prefix}pre_feedforward_layernorm.weight", hidden
        for name, shape in _mlp(config):
            yield f"{prefix}mlp.{name}", shape
        if config.post_norms:
            yield f"{prefix}post_feedforward_layernorm.weight", hidden
    yield "model.norm.weight", hidden
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, config.hidden_size)


def check_tensors(config: ModelConfig, source: WeightSource) -> None:
    """Compare a source with what its configuration calls for.

    Raises:
        ConfigError: A tensor is missing, has another shape, or has no place in the model.
    """
    unknown = set(source.names())
    for name, shape in expected_tensors(config):
        if name not in unknown:
            raise ConfigError(f"model: tensor {name} is missing")
        if source.shape(name) != shape:
            raise ConfigError(
                f"model: tensor {name} has shape {list(source.shape(name))}, "
                f"the configuration says {list(shape)}"
            )
        unknown.remove(name)
    for name in sorted(unknown):
        is_copy_of_embedding = name == "lm_head.weight" and config.tie_word_embeddings
        if not (is_copy_of_embedding or name.endswith(".rotary_emb.inv_freq")):
            raise ConfigError(f"model: tensor {name} has no place in this model")


def _attention(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    for name, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
        yield f"{name}.weight", (size, config.hidden_size)
        if config.attention_bias:
            yield f"{name}.bias", (size,)
    if config.qk_norm:
        yield "q_norm.weight", (config.head_dim,)
        yield "k_norm.weight", (config.head_dim,)
    yield "o_proj.weight", (config.hidden_size, q_size)
    if config.attention_out_bias:
        yield "o_proj.bias", (config.hidden_size,)


def _mlp(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    if not config.num_experts:
        yield from _gated("", config.intermediate_size, config.hidden_size)
        return
    yield "gate.weight", (config.num_experts, config.hidden_size)
    for expert in range(config.num_experts):
        yield from _gated(f"experts.{expert}.", config.moe_intermediate_size, config.hidden_size)


def _gated(prefix: str, inner: int, outer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}gate_proj.weight", (inner, outer)
    yield f"{prefix}up_proj.weight", (inner, outer)
    yield f"{prefix}down_proj.weight", (outer, inner)
