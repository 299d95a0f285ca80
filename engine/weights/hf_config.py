"""Hugging Face ``config.json`` → ModelConfig.

Reads both spellings of RoPE parameters: ``rope_theta`` + ``rope_scaling`` (up to transformers 4)
and ``rope_parameters`` (from 5 on). Defaults are those of the configuration classes of
transformers. A field known to change the result in a way the engine cannot follow raises; a field
nobody knows is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast, get_args

from engine.model_config import Architecture, HiddenAct, LayerType, ModelConfig
from engine.rope_config import RopeConfig, yarn_mscale
from engine.weights.config_fields import ConfigFields

_log = logging.getLogger(__name__)

_ACTIVATIONS: dict[str, HiddenAct] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Training, generation and bookkeeping: no influence on the forward pass.
# fmt: off
_NEUTRAL = (
    "_attn_implementation", "_attn_implementation_autoset", "_from_model_config",
    "_name_or_path", "_sliding_window_pattern", "architectures", "attention_dropout",
    "auto_map", "bos_token_id", "cache_implementation", "chunk_size_feed_forward", "dtype",
    "eos_token_id", "finetuning_task", "hidden_dropout", "id2label", "initializer_range",
    "is_decoder", "is_encoder_decoder", "is_llama_config", "label2id", "max_length",
    "max_window_layers", "output_attentions", "output_hidden_states", "output_router_logits",
    "pad_token_id", "pretraining_tp", "problem_type", "resid_pdrop", "return_dict",
    "router_aux_loss_coef", "sep_token_id", "task_specific_params", "tokenizer_class",
    "torch_dtype", "torchscript", "transformers.js_config", "transformers_version",
    "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
)
# fmt: on


def config_from_hf(config_json: Mapping[str, Any]) -> ModelConfig:
    """Read a parsed ``config.json``.

    Raises:
        ConfigError: A field is missing, wrong, or asks for something not supported.
    """
    fields = ConfigFields(config_json, "config.json")
    model_type = fields.text("model_type")
    if model_type not in get_args(Architecture):
        raise fields.error("model_type", f"is not supported: {model_type!r}")
    architecture = cast(Architecture, model_type)
    _refuse_unsupported(fields, architecture)
    is_gemma = architecture == "gemma3_text"
    num_layers = fields.integer("num_hidden_layers")
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    head_dim = _head_dim(fields, architecture, hidden_size, num_heads)
    sliding_window, layer_types = _layers(fields, architecture, num_layers)
    max_position_embeddings = fields.integer("max_position_embeddings")
    attention_bias = architecture == "qwen2" or (
        architecture != "mistral" and fields.boolean("attention_bias", False)
    )
    scale_base = fields.number("query_pre_attn_scalar", 256) if is_gemma else head_dim
    if scale_base <= 0:
        raise fields.error("query_pre_attn_scalar", f"must be positive: {scale_base}")
    is_moe = architecture == "qwen3_moe"
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=(
            fields.integer("num_key_value_heads", num_heads)
            if architecture == "llama"  # older than grouped heads: the field may be absent
            else fields.integer("num_key_value_heads")
        ),
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields, architecture, max_position_embeddings),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", is_gemma),
        hidden_act=_activation(fields, is_gemma),
        attention_bias=attention_bias,
        attention_out_bias=attention_bias and architecture != "qwen2",
        qk_norm=architecture in ("qwen3", "qwen3_moe", "gemma3_text"),
        sliding_window=sliding_window,
        layer_types=layer_types,
        query_scale=scale_base**-0.5,
        embedding_scale=hidden_size**0.5 if is_gemma else 1.0,
        norm_plus_one=is_gemma,
        post_norms=is_gemma,
        attn_logit_softcap=_softcap(fields, "attn_logit_softcapping", is_gemma),
        final_logit_softcap=_softcap(fields, "final_logit_softcapping", is_gemma),
        num_experts=_num_experts(fields) if is_moe else 0,
        num_experts_per_tok=fields.integer("num_experts_per_tok") if is_moe else 0,
        moe_intermediate_size=fields.integer("moe_intermediate_size") if is_moe else 0,
        norm_topk_prob=is_moe and fields.boolean("norm_topk_prob", False),
    )
    config.validate()
    fields.ignore(_NEUTRAL)
    if unknown := fields.unread():
        _log.warning("config.json: fields without effect: %s", ", ".join(unknown))
    return config


def _refuse_unsupported(fields: ConfigFields, architecture: Architecture) -> None:
    fields.refuse("quantization_config")
    fields.refuse("mlp_bias", False)
    fields.refuse("partial_rotary_factor", 1, 1.0)
    fields.refuse("rope_interleaved", False)
    fields.refuse("use_bidirectional_attention", False)
    fields.refuse("use_qk_norm", False)
    if architecture == "qwen2":
        fields.refuse("attention_bias", True)  # Qwen2 always has it
    if architecture == "mistral":
        fields.refuse("attention_bias", False)
    if architecture == "qwen3_moe":
        fields.refuse("mlp_only_layers", [])
        fields.refuse("decoder_sparse_step", 1)
    else:
        fields.refuse("num_experts", 0)
        fields.refuse("num_local_experts", 0, 1)
    if fields.has("architectures"):
        names = fields.sequence("architectures")
        if not any(isinstance(name, str) and name.endswith("ForCausalLM") for name in names):
            raise fields.error("architectures", f"names no causal language model: {names}")


def _head_dim(
    fields: ConfigFields, architecture: Architecture, hidden_size: int, num_heads: int
) -> int:
    if architecture == "qwen3":
        return fields.integer("head_dim", 128)
    if architecture == "gemma3_text":
        return fields.integer("head_dim", 256)
    if not fields.has("head_dim") and (num_heads == 0 or hidden_size % num_heads):
        raise fields.error("head_dim", "is missing and num_attention_heads divides no hidden_size")
    return fields.integer("head_dim", hidden_size // max(num_heads, 1))


def _activation(fields: ConfigFields, is_gemma: bool) -> HiddenAct:
    key, default = (
        ("hidden_activation", "gelu_pytorch_tanh") if is_gemma else ("hidden_act", "silu")
    )
    name = fields.text(key, default)
    if name not in _ACTIVATIONS:
        raise fields.error(key, f"is not supported: {name!r}")
    if is_gemma:
        fields.ignore(["hidden_act"])  # transformers reads hidden_activation alone
    return _ACTIVATIONS[name]


def _softcap(fields: ConfigFields, key: str, is_gemma: bool) -> float | None:
    if is_gemma and fields.has(key):
        return fields.number(key)
    fields.refuse(key)
    return None


def _num_experts(fields: ConfigFields) -> int:
    # transformers 5 writes the second name
    return fields.integer("num_experts" if fields.has("num_experts") else "num_local_experts")


def _layers(
    fields: ConfigFields, architecture: Architecture, num_layers: int
) -> tuple[int | None, tuple[LayerType, ...]]:
    """Return the sliding window and each layer's type."""
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    if architecture in ("qwen2", "qwen3", "qwen3_moe") and not fields.boolean(
        "use_sliding_window", False
    ):
        window = None
    if architecture == "llama":
        fields.refuse("sliding_window")
    if architecture == "gemma3_text" and window is None:
        window = 4096
    if window == 0:
        raise fields.error("sliding_window", "must be positive")
    if num_layers > 4096:
        raise fields.error("num_hidden_layers", f"is too large: {num_layers}")
    derived = _derived_layer_types(fields, architecture, num_layers, window)
    if not fields.has("layer_types"):
        return window, derived
    given = fields.sequence("layer_types")
    if not all(kind in get_args(LayerType) for kind in given):
        raise fields.error("layer_types", "may hold full_attention and sliding_attention only")
    if architecture in ("llama", "mistral", "qwen3_moe") and tuple(given) != derived:
        raise fields.error("layer_types", f"is not supported for {architecture}")
    return window, tuple(given)


def _derived_layer_types(
    fields: ConfigFields, architecture: Architecture, num_layers: int, window: int | None
) -> tuple[LayerType, ...]:
    first_sliding, period = num_layers, 0
    if architecture == "gemma3_text":
        # saved as sliding_window_pattern by transformers 4, with an underscore in between
        old = fields.integer("_sliding_window_pattern", 6)
        first_sliding, period = 0, fields.integer("sliding_window_pattern", old)
        if period == 0:
            raise fields.error("sliding_window_pattern", "must be positive")
    elif window is not None:
        starts_late = architecture in ("qwen2", "qwen3")
        first_sliding = fields.integer("max_window_layers", 28) if starts_late else 0
    return tuple(
        "sliding_attention"
        if i >= first_sliding and not (period and (i + 1) % period == 0)
        else "full_attention"
        for i in range(num_layers)
    )


def _rope(fields: ConfigFields, architecture: Architecture, max_positions: int) -> RopeConfig:
    is_gemma = architecture == "gemma3_text"
    theta = fields.number("rope_theta", 1e6 if is_gemma else 1e4)
    local_theta = fields.number("rope_local_base_freq", 1e4) if is_gemma else None
    key = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    if key == "rope_parameters":
        fields.refuse("rope_scaling")
    parameters = fields.section(key)
    if is_gemma and key == "rope_parameters":
        local = parameters.section("sliding_attention")
        kind = local.text("rope_type", "default")
        if kind != "default":
            raise local.error("rope_type", f"is not supported: {kind!r}")
        local_theta = local.number("rope_theta", local_theta)
        _refuse_unread(local)
        outer, parameters = parameters, parameters.section("full_attention")
        _refuse_unread(outer)
    original = parameters.integer("original_max_position_embeddings", max_positions)
    original = fields.integer("original_max_position_embeddings", original)  # this one wins
    rope = _scaled_rope(
        parameters,
        theta=parameters.number("rope_theta", theta),
        local_theta=local_theta,
        original=original,
        max_positions=max_positions,
    )
    _refuse_unread(parameters)
    return rope


def _scaled_rope(
    parameters: ConfigFields,
    *,
    theta: float,
    local_theta: float | None,
    original: int,
    max_positions: int,
) -> RopeConfig:
    parameters.refuse("partial_rotary_factor", 1, 1.0)
    old_kind = parameters.text("type", "default")
    kind = parameters.text("rope_type", old_kind)
    if kind == "default":
        return RopeConfig(theta=theta, local_theta=local_theta)
    if kind == "linear":
        return RopeConfig(
            theta=theta,
            local_theta=local_theta,
            scaling="linear",
            factor=parameters.number("factor"),
        )
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            local_theta=local_theta,
            scaling="llama3",
            factor=parameters.number("factor"),
            low_freq_factor=parameters.number("low_freq_factor"),
            high_freq_factor=parameters.number("high_freq_factor"),
            original_max_position_embeddings=original,
        )
    if kind == "yarn":
        factor = parameters.number("factor", max_positions / max(original, 1))
        return RopeConfig(
            theta=theta,
            local_theta=local_theta,
            scaling="yarn",
            factor=factor,
            beta_fast=parameters.number("beta_fast", 32.0) or 32.0,
            beta_slow=parameters.number("beta_slow", 1.0) or 1.0,
            truncate=parameters.boolean("truncate", True),
            attention_factor=_yarn_attention_factor(parameters, factor),
            original_max_position_embeddings=original,
        )
    raise parameters.error("rope_type", f"is not supported: {kind!r}")


def _yarn_attention_factor(parameters: ConfigFields, factor: float) -> float:
    mscale = parameters.number("mscale", 0.0)
    mscale_all_dim = parameters.number("mscale_all_dim", 0.0)
    if parameters.has("attention_factor"):
        return parameters.number("attention_factor")
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor)


def _refuse_unread(fields: ConfigFields) -> None:
    for key in fields.unread():
        raise fields.error(key, "is not supported")
