"""Small random models of every supported architecture, as transformers makes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "qwen3_moe"]

_SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_EXTRA: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-5},
    "mistral": {"sliding_window": 16},
    "qwen3": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32, "sliding_window": 16, "tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


@pytest.fixture(autouse=True)
def _quiet_transformers() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture
def tiny_model() -> Callable[..., Any]:
    """``tiny_model("qwen3", **config_fields)`` → a transformers model with random weights."""

    def make(model_type: str, **fields: Any) -> Any:
        config = transformers.AutoConfig.for_model(
            model_type, **{**_SHAPE, **_EXTRA.get(model_type, {}), **fields}
        )
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for weight in model.parameters():  # norms and biases too: they start as 1 and 0
                weight.copy_(torch.randn(weight.shape) * 0.1)
        return model

    return make


@pytest.fixture
def saved_model(tiny_model: Callable[..., Any], tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    """``saved_model("qwen3")`` → the model and the folder it was saved to."""

    def make(model_type: str, **fields: Any) -> tuple[Any, Path]:
        model = tiny_model(model_type, **fields)
        folder = tmp_path / model_type
        model.save_pretrained(folder)
        return model, folder

    return make
