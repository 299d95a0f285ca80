"""config.json → ModelConfig: published configurations, and refusals by name."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import msgspec
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from engine.weights.hf_config import config_from_hf
from mesh.errors import ConfigError

# As published on the Hub (fields without influence left out of some).
_PUBLISHED: dict[str, dict[str, Any]] = {
    "SmolLM2-135M-Instruct": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 576,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pad_token_id": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "transformers_version": "4.42.3",
        "use_cache": True,
        "vocab_size": 49152,
    },
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
    "Llama-2-7b-hf": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "rms_norm_eps": 1e-05,
        "vocab_size": 32000,
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "Mistral-7B-v0.3": {
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32768,
    },
    "Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
}
_LLAMA = _PUBLISHED["SmolLM2-135M-Instruct"]


@pytest.mark.parametrize("name", _PUBLISHED)
def test_published_configuration(name: str, caplog: pytest.LogCaptureFixture) -> None:
    fields = _PUBLISHED[name]
    with caplog.at_level(logging.WARNING):
        ours = config_from_hf(fields)
    theirs = transformers.AutoConfig.for_model(**msgspec.json.decode(msgspec.json.encode(fields)))
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (
        getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    )
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    if ours.architecture in ("qwen2", "qwen3", "gemma3_text"):
        assert list(ours.layer_types) == theirs.layer_types
    parameters = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    assert ours.rope.theta == parameters["rope_theta"]
    assert ours.num_experts == getattr(theirs, "num_experts", 0)
    assert ours.norm_topk_prob == getattr(theirs, "norm_topk_prob", False)
    if name == "Qwen2.5-0.5B":  # the one field nobody knows; false asks for nothing
        caplog.clear()
    assert not caplog.records


def test_gemma_arithmetic() -> None:
    config = config_from_hf(
        {
            **_PUBLISHED["gemma-3-1b-it"],
            "query_pre_attn_scalar": 168,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        }
    )
    assert config.query_scale == 168**-0.5
    assert config.embedding_scale == 1152**0.5
    assert (config.final_logit_softcap, config.attn_logit_softcap) == (30.0, 50.0)
    assert config.norm_plus_one
    assert config.post_norms
    assert config.qk_norm
    assert config.hidden_act == "gelu_tanh"
    assert config.rope.local_theta == 10000
    assert config.layer_types.count("full_attention") == 4


def test_qwen_window_starts_late() -> None:
    fields = {**_PUBLISHED["Qwen2.5-0.5B"], "use_sliding_window": True, "max_window_layers": 20}
    config = config_from_hf(fields)
    assert config.sliding_window == 32768
    assert config.layer_types == ("full_attention",) * 20 + ("sliding_attention",) * 4


def test_biases() -> None:
    def biases(name: str, **fields: Any) -> tuple[bool, bool]:
        config = config_from_hf({**_PUBLISHED[name], **fields})
        return config.attention_bias, config.attention_out_bias

    assert biases("Qwen2.5-0.5B") == (True, False)
    assert biases("Qwen3-0.6B") == (False, False)
    assert biases("Qwen3-0.6B", attention_bias=True) == (True, True)
    assert biases("Llama-3.2-1B", attention_bias=True) == (True, True)


def test_unknown_field_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    config_from_hf({**_LLAMA, "residual_multiplier": 0.22})
    assert "residual_multiplier" in caplog.text


# Errors of ModelConfig.validate speak of its own fields.
_OUR_NAMES = {
    "num_hidden_layers": "num_hidden_layers|num_layers",
    "num_key_value_heads": "num_key_value_heads|num_kv_heads",
    "final_logit_softcapping": "final_logit_softcap",
}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Llama-3.2-1B", {"model_type": "mixtral"}),
        ("Llama-3.2-1B", {"model_type": None}),
        ("Llama-3.2-1B", {"architectures": ["LlamaForSequenceClassification"]}),
        ("Llama-3.2-1B", {"quantization_config": {"quant_method": "gptq"}}),
        ("Llama-3.2-1B", {"mlp_bias": True}),
        ("Llama-3.2-1B", {"hidden_act": "relu"}),
        ("Llama-3.2-1B", {"partial_rotary_factor": 0.5}),
        ("Llama-3.2-1B", {"rope_interleaved": True}),
        ("Llama-3.2-1B", {"sliding_window": 128}),
        ("Llama-3.2-1B", {"layer_types": ["sliding_attention"] * 16}),
        ("Llama-3.2-1B", {"vocab_size": 0}),
        ("Llama-3.2-1B", {"vocab_size": 1 << 40}),
        ("Llama-3.2-1B", {"vocab_size": "128256"}),
        ("Llama-3.2-1B", {"hidden_size": None}),
        ("Llama-3.2-1B", {"num_hidden_layers": 100000}),
        ("Llama-3.2-1B", {"num_hidden_layers": True}),
        ("Llama-3.2-1B", {"num_key_value_heads": 5}),
        ("Llama-3.2-1B", {"head_dim": 63}),
        ("Llama-3.2-1B", {"rms_norm_eps": -1e-5}),
        ("Llama-3.2-1B", {"rope_theta": float("inf")}),
        ("Llama-3.2-1B", {"rope_theta": 10**400}),
        ("Llama-3.2-1B", {"rope_scaling": "linear"}),
        ("Llama-3.2-1B", {"num_experts": 8}),
        ("Llama-3.2-1B", {"attn_logit_softcapping": 50.0}),
        ("Mistral-7B-v0.1", {"sliding_window": 0}),
        ("Mistral-7B-v0.1", {"layer_types": ["full_attention"] * 32}),
        ("Mistral-7B-v0.1", {"num_key_value_heads": None}),
        ("Qwen2.5-0.5B", {"attention_bias": False}),
        ("Qwen2.5-0.5B", {"layer_types": ["linear_attention"] * 24}),
        ("Qwen2.5-0.5B", {"layer_types": ["full_attention"] * 23}),
        ("Qwen2.5-0.5B", {"layer_types": [{}] * 24}),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [0]}),
        ("Qwen3-30B-A3B", {"decoder_sparse_step": 2}),
        ("Qwen3-30B-A3B", {"num_experts_per_tok": 129}),
        ("Qwen3-30B-A3B", {"moe_intermediate_size": 0}),
        ("gemma-3-1b-it", {"use_bidirectional_attention": True}),
        ("gemma-3-1b-it", {"hidden_activation": "gelu"}),
        ("gemma-3-1b-it", {"query_pre_attn_scalar": 0}),
        ("gemma-3-1b-it", {"final_logit_softcapping": -1}),
        ("gemma-3-1b-it", {"sliding_window_pattern": 0}),
    ],
)
def test_refused_by_name(name: str, change: dict[str, Any]) -> None:
    (field,) = change
    with pytest.raises(ConfigError, match=_OUR_NAMES.get(field, field)):
        config_from_hf({**_PUBLISHED[name], **change})


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@given(data=st.data())
def test_any_value_anywhere(data: st.DataObject) -> None:
    """Whatever stands in one or two fields, the answer is a configuration or a ConfigError."""
    fields = dict(_PUBLISHED[data.draw(st.sampled_from(sorted(_PUBLISHED)))])
    keys = [*fields, "layer_types", "rope_parameters", "rope_scaling", "use_sliding_window"]
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=2)):
        fields[key] = data.draw(_JSON)
    with contextlib.suppress(ConfigError):
        config_from_hf(fields)


def test_both_spellings() -> None:
    """What transformers writes today says the same as what it wrote years ago."""
    for name in ("Llama-3.2-1B", "gemma-3-1b-it", "Qwen3-30B-A3B"):
        fields = msgspec.json.decode(msgspec.json.encode(_PUBLISHED[name]))
        written = transformers.AutoConfig.for_model(**fields).to_dict()
        written["architectures"] = fields["architectures"]
        assert config_from_hf(written) == config_from_hf(_PUBLISHED[name])
