"""Writes a transformers model as GGUF, the way llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.unit.engine.weights.hf_tensors import hf_tensors

GGUF_NAMES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}
_ARCHITECTURES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}


def write_gguf(
    path: Path,
    model: Any,
    *,
    storage: str = "F32",
    fields: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
) -> None:
    """Write ``model`` to ``path``.

    Args:
        path: File to write.
        model: A transformers causal language model.
        storage: Name of the GGML type of the matrices.
        fields: More integer or float metadata, keys without the architecture's name.
        extra: More tensors.
    """
    config = model.config
    name = GGUF_NAMES[config.model_type]
    writer = gguf.GGUFWriter(path, name)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_file_type(0)
    writer.add_token_list([f"token {i}" for i in range(config.vocab_size)])
    writer.add_token_scores([0.5] * config.vocab_size)
    if name == "llama":
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head_dim)
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if name == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    if name == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for key, value in (fields or {}).items():
        add = {
            str: writer.add_string,
            int: writer.add_uint32,
            float: writer.add_float32,
            bool: writer.add_bool,
            list: writer.add_array,
        }[type(value)]
        add(f"{name}.{key}", value)
    kind = gguf.GGMLQuantizationType[storage]
    for tensor_name, tensor in _gguf_tensors(model, name).items():
        values = tensor.to(torch.float32).numpy()
        if values.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(tensor_name, values)
        else:
            writer.add_tensor(tensor_name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for tensor_name, array in (extra or {}).items():
        writer.add_tensor(tensor_name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_tensors(model: Any, name: str) -> dict[str, torch.Tensor]:
    config = model.config
    names = gguf.get_tensor_name_map(_ARCHITECTURES[name], config.num_hidden_layers)
    tensors: dict[str, torch.Tensor] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for hf_name, tensor in hf_tensors(model).items():
        stem, _, suffix = hf_name.rpartition(".")
        if ".mlp.experts." in stem:
            layer, part = stem.split(".")[2], stem.split(".")[-1].removesuffix("_proj")
            experts.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", []).append(tensor)
            continue
        if name == "llama" and stem.endswith("q_proj"):
            tensor = _permute(tensor, config.num_attention_heads)
        if name == "llama" and stem.endswith("k_proj"):
            tensor = _permute(tensor, config.num_key_value_heads)
        if name == "gemma3" and hf_name.endswith("norm.weight"):
            tensor = tensor + 1
        gguf_stem = names.get_name(stem)
        assert gguf_stem is not None, stem
        tensors[f"{gguf_stem}.{suffix}"] = tensor
    return tensors | {key: torch.stack(stack) for key, stack in experts.items()}


def _permute(weights: torch.Tensor, num_heads: int) -> torch.Tensor:
    # LlamaModel.permute of convert_hf_to_gguf.py
    rows = weights.shape[0] // num_heads // 2
    split = weights.reshape(num_heads, 2, rows, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)
