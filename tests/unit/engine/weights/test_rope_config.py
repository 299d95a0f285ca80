"""RoPE frequencies are those of transformers, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.model_config import inv_freq
from engine.rope_config import RopeConfig, rope_inv_freq
from engine.weights.hf_config import config_from_hf
from mesh.errors import ConfigError

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    _LLAMA3,
    {**_LLAMA3, "factor": 32.0, "original_max_position_embeddings": 1024},
    _YARN,
    {**_YARN, "attention_factor": 0.75},
    {**_YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    {**_YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    {**_YARN, "factor": 1.0},
]


def _llama(**fields: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 512,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16384,
        **fields,
    }


def _assert_same(ours: tuple[torch.Tensor, float], theirs: torch.Tensor, factor: float) -> None:
    assert ours[0].dtype == torch.float32
    assert torch.equal(ours[0], theirs)
    assert ours[1] == factor


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("scaling", _SCALINGS, ids=lambda s: str(s["rope_type"]))
def test_scaled_frequencies(scaling: dict[str, Any], theta: float, head_dim: int) -> None:
    fields = _llama(head_dim=head_dim, rope_parameters={**scaling, "rope_theta": theta})
    ours = inv_freq(config_from_hf(fields))
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**fields))
    _assert_same(ours, theirs.inv_freq, theirs.attention_scaling)


@pytest.mark.parametrize("scaling", _SCALINGS, ids=lambda s: str(s["rope_type"]))
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_spelling_of_transformers_4(scaling: dict[str, Any], key: str) -> None:
    old = {**scaling, key: scaling["rope_type"]}
    if key == "type":
        del old["rope_type"]
    new = _llama(rope_parameters={**scaling, "rope_theta": 77.0})
    assert config_from_hf(_llama(rope_theta=77.0, rope_scaling=old)) == config_from_hf(new)


@pytest.mark.parametrize("full", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0}])
def test_gemma_layers_differ(full: dict[str, Any]) -> None:
    def fields() -> dict[str, Any]:
        return _llama(
            model_type="gemma3_text",
            num_hidden_layers=6,
            rope_parameters={
                "full_attention": {**full, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        )

    theirs = Gemma3RotaryEmbedding(transformers.Gemma3TextConfig(**fields()))
    ours = config_from_hf(fields())
    _assert_same(inv_freq(ours, "full_attention"), theirs.full_attention_inv_freq, 1.0)
    _assert_same(inv_freq(ours, "sliding_attention"), theirs.sliding_attention_inv_freq, 1.0)


def test_gguf_factors_divide() -> None:
    factors = (1.0, 2.0, 4.0, 8.0)
    plain, _ = rope_inv_freq(RopeConfig(theta=1e4), 8)
    rope = RopeConfig(theta=1e4, scaling="factors", freq_factors=factors)
    scaled, _ = rope_inv_freq(rope, 8)
    assert torch.equal(scaled, plain / torch.tensor(factors))


@pytest.mark.parametrize(
    ("scaling", "field"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type"),
        ({"rope_type": "longrope"}, "rope_type"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0.0}, "factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section"),
        ({**_LLAMA3, "high_freq_factor": 1.0}, "low_freq_factor"),
        ({**_YARN, "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({**_YARN, "beta_slow": 64}, "beta_slow"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    ],
)
def test_refused(scaling: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        config_from_hf(_llama(rope_parameters=scaling))
