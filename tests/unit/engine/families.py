"""Small configurations of every supported architecture, and random models of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "llama-bias-untied": transformers.LlamaConfig(
        **SHAPE, attention_bias=True, tie_word_embeddings=False
    ),
    "llama-linear": transformers.LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    ),
    "llama-llama3": transformers.LlamaConfig(
        **SHAPE, rope_parameters={**_LLAMA3, "rope_theta": 1e4}
    ),
    "llama-yarn": transformers.LlamaConfig(**SHAPE, rope_parameters={**_YARN, "rope_theta": 1e4}),
    "mistral-window": transformers.MistralConfig(**SHAPE, sliding_window=24),
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "qwen3": transformers.Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "gemma3": transformers.Gemma3TextConfig(
        **SHAPE, sliding_window=24, layer_types=["sliding_attention"] * 2 + ["full_attention"]
    ),
    "qwen3-moe": transformers.Qwen3MoeConfig(**SHAPE, **_MOE, norm_topk_prob=True),
}


def random_model(family: str, folder: Path) -> Any:
    """Transformers' float32 model, saved in ``folder``; norms and biases are random, too."""
    torch.manual_seed(7)
    config = FAMILIES[family]
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 0.0 if "gemma" in family else 1.0, 0.2)
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.save_pretrained(folder)
    return model
