"""What a model is, independent of the file format it came from."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import torch

from engine.rope_config import RopeConfig, rope_inv_freq
from mesh.errors import ConfigError

Architecture = Literal["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "qwen3_moe"]
LayerType = Literal["full_attention", "sliding_attention"]
HiddenAct = Literal["silu", "gelu_tanh"]

# Far above any published model; they bound what a hostile file can make us allocate.
_LIMITS = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_layers": 512,
    "num_heads": 1024,
    "num_kv_heads": 1024,
    "head_dim": 1024,
    "max_position_embeddings": 1 << 26,
}


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and arithmetic of a decoder-only transformer.

    Every layer is ``x += attention(norm(x)); x += mlp(norm(x))`` with RMS norm and a gated MLP
    (``down(act(gate(x)) * up(x))``), or a mixture of such MLPs. ``post_norms`` adds one more norm
    on each branch's output, before the residual addition.
    """

    architecture: Architecture
    """Hugging Face ``model_type``; code should rather look at the fields below."""
    vocab_size: int
    """Rows of the embedding, padding rows of the checkpoint included."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of a dense MLP (unused by layers that are mixtures of experts)."""
    num_layers: int
    """Decoder layers."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key/value heads; divides ``num_heads``."""
    head_dim: int
    """Width of a head; not always hidden_size / num_heads."""
    rms_norm_eps: float
    """Added to the mean square under the root."""
    rope: RopeConfig
    """Rotary position embedding."""
    max_position_embeddings: int
    """Longest context the model was made for, in tokens."""
    tie_word_embeddings: bool
    """True: there is no ``lm_head.weight``, the output head is ``model.embed_tokens.weight``."""
    hidden_act: HiddenAct = "silu"
    """Activation of the gate; ``gelu_tanh`` is the tanh approximation of GELU."""
    attention_bias: bool = False
    """``q_proj``, ``k_proj`` and ``v_proj`` have a bias."""
    attention_out_bias: bool = False
    """``o_proj`` has a bias."""
    qk_norm: bool = False
    """RMS norm over each query and key head (weight ``[head_dim]``) before RoPE."""
    sliding_window: int | None = None
    """Sliding layers: a query at ``i`` sees keys ``i - sliding_window < j <= i``."""
    layer_types: tuple[LayerType, ...]
    """One entry per layer."""
    query_scale: float
    """Multiplier of ``q @ k`` before the softmax."""
    embedding_scale: float = 1.0
    """Multiplier of the embedding's output (the tied head stays unscaled)."""
    norm_plus_one: bool = False
    """Every norm multiplies with ``1 + weight`` (Gemma), the qk norms included."""
    post_norms: bool = False
    """Norms after attention and MLP: ``post_attention_layernorm`` then is the attention's,
    the MLP has ``pre_feedforward_layernorm`` and ``post_feedforward_layernorm``."""
    attn_logit_softcap: float | None = None
    """Attention logits become ``cap * tanh(logits / cap)``."""
    final_logit_softcap: float | None = None
    """Output logits become ``cap * tanh(logits / cap)``."""
    num_experts: int = 0
    """Experts of each layer; 0: dense MLPs."""
    num_experts_per_tok: int = 0
    """Experts that each token runs through."""
    moe_intermediate_size: int = 0
    """Width of one expert."""
    norm_topk_prob: bool = False
    """The chosen experts' probabilities (softmax over all experts) are rescaled to sum to 1."""

    def validate(self) -> None:
        """Check the fields against each other.

        Raises:
            ConfigError: Naming the field at fault.
        """
        for field, limit in _LIMITS.items():
            if not 0 < getattr(self, field) <= limit:
                raise ConfigError(f"model: {field} must be in 1..{limit}: {getattr(self, field)}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model: num_kv_heads {self.num_kv_heads} does not divide "
                f"num_heads {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"model: head_dim must be even for RoPE: {self.head_dim}")
        if not 0 < self.rms_norm_eps < 1:
            raise ConfigError(f"model: rms_norm_eps must be in (0, 1): {self.rms_norm_eps}")
        if not (0 < self.query_scale < math.inf and 0 < self.embedding_scale < math.inf):
            raise ConfigError("model: query_scale and embedding_scale must be positive")
        if len(self.layer_types) != self.num_layers:
            raise ConfigError(
                f"model: layer_types has {len(self.layer_types)} entries for "
                f"{self.num_layers} layers"
            )
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ConfigError("model: sliding_window is needed by layer_types")
        for field in ("attn_logit_softcap", "final_logit_softcap"):
            cap = getattr(self, field)
            if cap is not None and not 0 < cap < math.inf:
                raise ConfigError(f"model: {field} must be positive: {cap}")
        self._validate_rope()
        self._validate_experts()

    def _validate_rope(self) -> None:
        rope = self.rope
        thetas = (rope.theta,) if rope.local_theta is None else (rope.theta, rope.local_theta)
        if not all(1 < theta < math.inf for theta in thetas):
            raise ConfigError(f"model: rope theta must be above 1: {thetas}")
        if not 0 < rope.factor < math.inf:
            raise ConfigError(f"model: rope factor must be positive: {rope.factor}")
        if rope.scaling in ("llama3", "yarn") and rope.original_max_position_embeddings <= 0:
            raise ConfigError("model: rope original_max_position_embeddings must be positive")
        if rope.scaling == "llama3" and not 0 < rope.low_freq_factor < rope.high_freq_factor:
            raise ConfigError("model: rope low_freq_factor must be below high_freq_factor")
        if rope.scaling == "yarn" and not 0 < rope.beta_slow <= rope.beta_fast:
            raise ConfigError("model: rope beta_slow must not be above beta_fast")
        if not 0 < rope.attention_factor < math.inf:
            raise ConfigError("model: rope attention_factor must be positive")
        if rope.scaling == "factors" and (
            len(rope.freq_factors) != self.head_dim // 2
            or not all(0 < factor < math.inf for factor in rope.freq_factors)
        ):
            raise ConfigError("model: rope_freqs must hold head_dim / 2 positive numbers")

    def _validate_experts(self) -> None:
        if self.num_experts == 0:
            return
        if not 0 < self.num_experts <= 1024:
            raise ConfigError(f"model: num_experts must be in 1..1024: {self.num_experts}")
        if not 0 < self.num_experts_per_tok <= self.num_experts:
            raise ConfigError(
                f"model: num_experts_per_tok must be in 1..{self.num_experts}: "
                f"{self.num_experts_per_tok}"
            )
        if not 0 < self.moe_intermediate_size <= _LIMITS["intermediate_size"]:
            raise ConfigError(
                f"model: moe_intermediate_size is out of range: {self.moe_intermediate_size}"
            )


def inv_freq(
    config: ModelConfig, layer_type: LayerType = "full_attention"
) -> tuple[torch.Tensor, float]:
    """RoPE inverse frequencies (float32 ``[head_dim / 2]``) and the factor on cos and sin."""
    return rope_inv_freq(config.rope, config.head_dim, local=layer_type == "sliding_attention")
