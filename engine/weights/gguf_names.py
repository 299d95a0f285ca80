"""GGUF tensor names ↔ Hugging Face names, per architecture."""

from __future__ import annotations

import re

from engine.model_config import Architecture

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_PRE_NORMS = {"ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_STACKED_EXPERTS = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(\w+)\.(weight|bias)")

ROPE_FACTORS = "rope_freqs.weight"
"""Not a weight: Llama 3's RoPE scaling, as one divisor for each frequency."""


def hf_name(gguf_name: str, architecture: Architecture) -> str | None:
    """Translate a tensor's name; None if it is none of the architecture's plain tensors."""
    if gguf_name in _TOP:
        return _TOP[gguf_name]
    match = _LAYER_NAME.fullmatch(gguf_name)
    if match is None:
        return None
    layer, part, suffix = match.groups()
    norms = _POST_NORMS if architecture == "gemma3_text" else _PRE_NORMS
    module = _LAYER.get(part) or norms.get(part)
    return None if module is None else f"model.layers.{layer}.{module}.{suffix}"


def hf_expert_names(gguf_name: str, num_experts: int) -> list[str] | None:
    """Names of the experts' matrices that a stacked tensor ``[expert, out, in]`` holds."""
    match = _LAYER_NAME.fullmatch(gguf_name)
    if match is None or match[2] not in _STACKED_EXPERTS or match[3] != "weight":
        return None
    projection = _STACKED_EXPERTS[match[2]]
    return [
        f"model.layers.{match[1]}.mlp.experts.{expert}.{projection}.weight"
        for expert in range(num_experts)
    ]
