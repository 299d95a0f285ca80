"""The decoder-only transformer that all supported architectures are variants of.

x = embed(tokens)
for each layer:
    qkv = W_qkv · norm(x);  rope(q, k);  KV cache ← k, v
    x += W_o · attention(q, KV cache)
    x += W_down · (act(W_gate · norm(x)) * (W_up · norm(x)))
logits = W_head · norm(x)[sampled rows]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.backends.base import Backend, Linear
from engine.batch import BatchInputs
from engine.model_config import ModelConfig, inv_freq
from engine.weights import WeightSource
from mesh.errors import ConfigError


@dataclass(slots=True, frozen=True)
class RopeTable:
    """cos and sin, [max positions, D / 2] float32."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(slots=True, frozen=True)
class QKNorm:
    """Per-head RMS norm weights of q and k, [D] each."""

    q: torch.Tensor
    k: torch.Tensor


@dataclass(slots=True, frozen=True)
class DecoderLayer:
    """One layer's weights in the backend's form."""

    attention_norm: torch.Tensor
    qkv: Linear
    qk_norm: QKNorm | None
    rope: RopeTable
    window: int
    """Sliding window in tokens; 0 is unlimited."""
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Runs one forward for a ragged batch. Owns the weights; the backend owns the KV cache."""

    def __init__(self, config: ModelConfig, source: WeightSource, backend: Backend, max_len: int):
        """Load all weights.

        Args:
            config: What to build.
            source: Where the float32 weights come from; not kept.
            backend: Holds the stored form and runs the ops.
            max_len: Longest sequence, in tokens: the size of the rotary tables.

        Raises:
            ConfigError: The model needs something that is not built yet.
        """
        _refuse_unsupported(config)
        self.config = config
        self._backend = backend
        tables: dict[str, RopeTable] = {}
        for layer_type in set(config.layer_types):
            frequencies, factor = inv_freq(config, layer_type)
            angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)
            tables[layer_type] = RopeTable(angles.cos() * factor, angles.sin() * factor)
        self._embed, self._head = backend.embedding_and_head(
            source.get("model.embed_tokens.weight"),
            None if config.tie_word_embeddings else source.get("lm_head.weight"),
        )
        self._norm = source.get("model.norm.weight")
        self._layers = [
            self._load_layer(source, index, tables[config.layer_types[index]])
            for index in range(config.num_layers)
        ]

    @property
    def num_weight_bytes(self) -> int:
        """Memory of all weights in their stored form."""
        linears = [self._head]
        for layer in self._layers:
            linears += [layer.qkv, layer.output, layer.gate_up, layer.down]
        return self._embed.num_bytes + sum(linear.num_bytes for linear in linears)

    def forward(self, batch: BatchInputs) -> torch.Tensor:
        """Compute the batch, write its KV, and return logits of its sampled rows, [N, V]."""
        backend = self._backend
        config = self.config
        eps = config.rms_norm_eps
        step = backend.begin_step(batch)
        residual = self._embed(torch.from_numpy(batch.token_ids))
        hidden = backend.rms_norm(residual, self._layers[0].attention_norm, eps)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(hidden)
            backend.rope_and_write_kv(qkv, layer.rope.cos, layer.rope.sin, index, step)
            attended = backend.paged_attention(qkv, index, config.query_scale, step)
            hidden = backend.add_rms_norm(layer.output(attended), residual, layer.mlp_norm, eps)
            mlp = layer.down(backend.silu_mul(layer.gate_up(hidden)))
            if index < last:
                norm = self._layers[index + 1].attention_norm
                hidden = backend.add_rms_norm(mlp, residual, norm, eps)
        rows = torch.from_numpy(batch.sample_rows)
        hidden = backend.add_rms_norm(mlp[rows], residual[rows], self._norm, eps)
        return self._head(hidden)

    def _load_layer(self, source: WeightSource, index: int, rope: RopeTable) -> DecoderLayer:
        config, linear = self.config, self._backend.linear
        prefix = f"model.layers.{index}."

        def stacked(*names: str, bias: bool = False) -> Linear:
            weight = torch.cat([source.get(f"{prefix}{name}.weight") for name in names])
            if not bias:
                return linear(weight)
            return linear(weight, torch.cat([source.get(f"{prefix}{n}.bias") for n in names]))

        attention = "self_attn."
        return DecoderLayer(
            attention_norm=source.get(f"{prefix}input_layernorm.weight"),
            qkv=stacked(*(f"{attention}{p}_proj" for p in "qkv"), bias=config.attention_bias),
            qk_norm=None,
            rope=rope,
            window=0,
            output=stacked(f"{attention}o_proj", bias=config.attention_out_bias),
            mlp_norm=source.get(f"{prefix}post_attention_layernorm.weight"),
            gate_up=stacked("mlp.gate_proj", "mlp.up_proj"),
            down=stacked("mlp.down_proj"),
        )


def _refuse_unsupported(config: ModelConfig) -> None:
    unsupported: dict[str, Any] = {
        "qk_norm": config.qk_norm,
        "sliding attention": "sliding_attention" in config.layer_types,
        "norm_plus_one": config.norm_plus_one,
        "post_norms": config.post_norms,
        "experts": config.num_experts,
        "hidden_act": config.hidden_act != "silu",
        "embedding_scale": config.embedding_scale != 1.0,
        "logit softcap": config.attn_logit_softcap or config.final_logit_softcap,
    }
    for name, present in unsupported.items():
        if present:
            raise ConfigError(f"model: {name} is not supported ({config.architecture})")
