"""GGUF metadata → ModelConfig.

Keys are those of llama.cpp (``gguf.constants.Keys``) behind the architecture's name. What the
format leaves out is filled in as llama.cpp does: Gemma 3's window pattern, local RoPE base and
attention scale, Qwen3 MoE's normalised expert weights. A key under the architecture's name that is
not known here raises: it describes arithmetic the engine does not do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.model_config import Architecture, LayerType, ModelConfig
from engine.rope_config import RopeConfig, yarn_mscale
from engine.weights.config_fields import ConfigFields

_ARCHITECTURES: dict[str, Architecture] = {
    "llama": "llama",  # Mistral models too
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
}
_GEMMA3_PATTERN = 6  # five sliding layers, then a full one
_GEMMA3_LOCAL_THETA = 10_000.0
_GEMMA3_27B_LAYERS = 62  # scales queries by hidden_size / num_heads instead of head_dim


def config_from_gguf(
    fields: Mapping[str, Any],
    *,
    tensor_shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Sequence[float] = (),
) -> ModelConfig:
    """Read the metadata of a GGUF file.

    Args:
        fields: Metadata by key, as ``GgufHeader.fields``.
        tensor_shapes: Shapes of the file's tensors by their GGUF names, outermost first: they
            tell tied embeddings, biases and the size of the vocabulary.
        rope_factors: Content of the tensor ``rope_freqs.weight`` where there is one.

    Raises:
        ConfigError: A field is missing, wrong, or asks for something not supported.
    """
    general = ConfigFields(fields, "GGUF")
    name = general.text("general.architecture")
    if name not in _ARCHITECTURES:
        raise general.error("general.architecture", f"is not supported: {name!r}")
    general.refuse("split.count", 0, 1)
    architecture = _ARCHITECTURES[name]
    own = ConfigFields(
        {
            key.removeprefix(f"{name}."): v
            for key, v in fields.items()
            if key.startswith(f"{name}.")
        },
        f"GGUF: {name}",
    )
    is_gemma = architecture == "gemma3_text"
    is_moe = architecture == "qwen3_moe"
    hidden_size = own.integer("embedding_length")
    num_layers = _uniform(own, "block_count")
    num_heads = _uniform(own, "attention.head_count")
    head_dim = _head_dim(own, hidden_size, num_heads)
    num_kv_heads = _uniform(own, "attention.head_count_kv", num_heads)
    window, layer_types = _layers(own, is_gemma, num_layers)
    scale_base = head_dim
    if is_gemma and num_layers == _GEMMA3_27B_LAYERS:
        scale_base = hidden_size // num_heads
    # not every converter writes vocab_size
    embedding_rows = tensor_shapes.get("token_embd.weight", (0,))[0]
    config = ModelConfig(
        architecture=architecture,
        vocab_size=own.integer("vocab_size", embedding_rows),
        hidden_size=hidden_size,
        intermediate_size=_uniform(own, "feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        # the file holds the float32 nearest to the value
        rms_norm_eps=own.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(own, is_gemma, rope_factors),
        max_position_embeddings=own.integer("context_length"),
        tie_word_embeddings="output.weight" not in tensor_shapes,
        hidden_act="gelu_tanh" if is_gemma else "silu",
        attention_bias="blk.0.attn_q.bias" in tensor_shapes,
        attention_out_bias="blk.0.attn_output.bias" in tensor_shapes,
        qk_norm=architecture in ("qwen3", "qwen3_moe", "gemma3_text"),
        sliding_window=window,
        layer_types=layer_types,
        query_scale=scale_base**-0.5 if scale_base else 0.0,
        embedding_scale=hidden_size**0.5 if is_gemma else 1.0,
        norm_plus_one=is_gemma,
        post_norms=is_gemma,
        attn_logit_softcap=_softcap(own, "attn_logit_softcapping", is_gemma),
        final_logit_softcap=_softcap(own, "final_logit_softcapping", is_gemma),
        num_experts=own.integer("expert_count") if is_moe else 0,
        num_experts_per_tok=own.integer("expert_used_count") if is_moe else 0,
        moe_intermediate_size=own.integer("expert_feed_forward_length") if is_moe else 0,
        norm_topk_prob=is_moe and own.boolean("expert_weights_norm", True),
    )
    if not is_moe:
        own.refuse("expert_count", 0)
        own.refuse("expert_used_count", 0)
    own.refuse("attention.causal", True)
    own.refuse("use_parallel_residual", False)
    own.ignore(["tensor_data_layout", "pooling_type", "rope.scaling.finetuned"])
    for key in own.unread():
        raise own.error(key, "is not supported")
    config.validate()
    return config


def _uniform(own: ConfigFields, key: str, default: int | None = None) -> int:
    """Read a number that may also be stored once per layer; the layers must agree."""
    if not own.is_sequence(key):
        return own.integer(key, default)
    values = own.sequence(key)
    if len(set(values)) != 1 or type(values[0]) is not int or not 0 <= values[0] < 1 << 31:
        raise own.error(key, "differs from layer to layer")
    return int(values[0])


def _head_dim(own: ConfigFields, hidden_size: int, num_heads: int) -> int:
    if num_heads == 0:
        raise own.error("attention.head_count", "must be positive")
    head_dim = own.integer("attention.key_length", hidden_size // num_heads)
    own.refuse("attention.value_length", head_dim)
    own.refuse("attention.key_length_swa", head_dim)
    own.refuse("attention.value_length_swa", head_dim)
    own.refuse("rope.dimension_count", head_dim)  # else a partial rotation
    own.refuse("rope.dimension_count_swa", head_dim)
    return head_dim


def _layers(
    own: ConfigFields, is_gemma: bool, num_layers: int
) -> tuple[int | None, tuple[LayerType, ...]]:
    if num_layers > 4096:
        raise own.error("block_count", f"is too large: {num_layers}")
    key = "attention.sliding_window"
    window = own.integer(key) if is_gemma or own.has(key) else 0
    if not window:  # 0: llama.cpp's "no window"
        full: LayerType = "full_attention"
        return None, (full,) * num_layers
    pattern_key = "attention.sliding_window_pattern"
    if own.is_sequence(pattern_key):
        is_sliding = own.sequence(pattern_key)
        if len(is_sliding) != num_layers or not all(isinstance(flag, bool) for flag in is_sliding):
            raise own.error(pattern_key, "must hold one truth value for each layer")
    else:
        period = own.integer(pattern_key, _GEMMA3_PATTERN if is_gemma else 0)
        is_sliding = [not (period and (i + 1) % period == 0) for i in range(num_layers)]
    return window, tuple("sliding_attention" if flag else "full_attention" for flag in is_sliding)


def _rope(own: ConfigFields, is_gemma: bool, rope_factors: Sequence[float]) -> RopeConfig:
    theta = own.number("rope.freq_base", 10_000.0)
    local_theta = own.number("rope.freq_base_swa", _GEMMA3_LOCAL_THETA) if is_gemma else None
    factor = own.number("rope.scaling.factor", own.number("rope.scale_linear", 1.0))
    kind = own.text("rope.scaling.type", "linear" if factor != 1 else "none")
    attention_factor = own.number(
        "rope.scaling.yarn_attn_factor", own.number("rope.scaling.attn_factor", 1.0)
    )
    own.refuse("rope.scaling.yarn_log_multiplier", 0.0)
    own.refuse("rope.scaling.yarn_ext_factor", 1.0)
    own.refuse("rope.scaling.alpha", 0.0)
    original = own.integer("rope.scaling.original_context_length", 0)
    if rope_factors:
        if kind != "none":
            raise own.error("rope.scaling.type", f"{kind!r} together with rope_freqs.weight")
        return RopeConfig(
            theta=theta,
            local_theta=local_theta,
            scaling="factors",
            freq_factors=tuple(rope_factors),
        )
    if kind == "none" or (kind == "linear" and factor == 1):
        return RopeConfig(theta=theta, local_theta=local_theta)
    if kind == "linear":
        return RopeConfig(theta=theta, local_theta=local_theta, scaling="linear", factor=factor)
    if kind == "yarn":
        return RopeConfig(
            theta=theta,
            local_theta=local_theta,
            scaling="yarn",
            factor=factor,
            beta_fast=own.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=own.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=attention_factor * yarn_mscale(factor),
            original_max_position_embeddings=original or own.integer("context_length"),
        )
    raise own.error("rope.scaling.type", f"is not supported: {kind!r}")


def _softcap(own: ConfigFields, key: str, is_gemma: bool) -> float | None:
    cap = own.number(key, 0.0)
    if cap and not is_gemma:
        raise own.error(key, "is not supported")
    return cap or None
