"""The decoder-only transformer that all supported architectures are variants of.

    x = embed(tokens)
    for each layer:
        qkv = W_qkv · norm(x);  rope(q, k);  KV cache ← k, v
        x += W_o · attention(q, KV cache)
        x += mlp(norm(x))
    logits = W_head · norm(x)[sampled rows]

Variants: biases (Qwen2), norms on q and k (Qwen3, Gemma 3), norms after each branch, scaled
embeddings and sliding windows (Gemma 3), a mixture of experts as the MLP (Qwen3-MoE).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from engine.backend import (
    Backend,
    DenseLayer,
    Embedding,
    LayerForm,
    LayerStack,
    Linear,
    QKNorm,
    RopeTable,
    StepInputs,
)
from engine.batch import BatchInputs
from engine.model_config import ModelConfig, inv_freq
from engine.models.mlp import GatedMlp, MoeMlp, WrapLinear
from engine.tensor_parallel.group import TensorParallelGroup
from engine.tensor_parallel.shard import ModelShard
from engine.tensor_parallel.sharded_source import ShardedSource
from engine.tensor_parallel.vocabulary import SplitEmbedding, SplitHead
from engine.weights.source import WeightSource
from mesh.errors import ConfigError


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
    post_attention_norm: torch.Tensor | None
    """On the attention's output, before the residual addition."""
    mlp_norm: torch.Tensor
    mlp: GatedMlp | MoeMlp
    post_mlp_norm: torch.Tensor | None


class Decoder:
    """Runs one forward for a ragged batch. Owns the weights; the backend owns the KV cache."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        backend: Backend,
        max_len: int,
        shard: ModelShard | None = None,
        group: TensorParallelGroup | None = None,
    ) -> None:
        """Load all weights, or a rank's part of them.

        Args:
            config: What to build.
            source: Where the float32 weights come from; not kept.
            backend: Holds the stored form and runs the ops.
            max_len: Longest sequence, in tokens: the size of the rotary tables.
            shard: What this rank holds; None: everything.
            group: The ranks that run the model together.

        Raises:
            ConfigError: The model needs something that is not built yet.
        """
        if config.attn_logit_softcap and not backend.has_attention_softcap:
            raise ConfigError(
                f"model: attention logit softcap is not supported on a {backend.device.type} "
                f"({config.architecture})"
            )
        self.config = config
        self._backend = backend
        tables: dict[str, RopeTable] = {}
        for layer_type in set(config.layer_types):
            frequencies, factor = inv_freq(config, layer_type)
            angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)
            cos, sin = angles.cos() * factor, angles.sin() * factor
            tables[layer_type] = RopeTable(cos.to(backend.device), sin.to(backend.device))
        self._group = group or TensorParallelGroup()
        if shard is not None and shard.size > 1:
            source = ShardedSource(source, shard)
        self._embed, self._head = backend.embedding_and_head(
            source.get("model.embed_tokens.weight"),
            None if config.tie_word_embeddings else source.get("lm_head.weight"),
        )
        if shard is not None and shard.size > 1:
            self._embed = SplitEmbedding(self._embed, shard, self._group)
            self._head = SplitHead(self._head, shard, self._group)
        self._norm = self._load_norm(source, "model.norm")
        self._layers = [
            self._load_layer(source, index, tables[layer_type])
            for index, layer_type in enumerate(config.layer_types)
        ]
        self._stack = self._layer_stack()

    @property
    def backend(self) -> Backend:
        """What runs its ops."""
        return self._backend

    @property
    def has_layer_stack(self) -> bool:
        """Whether its layers are computed in one go."""
        return self._stack is not None

    @property
    def a_product(self) -> Linear:
        """A large weight matrix that reads the hidden state."""
        return self._layers[0].mlp.linears()[0]

    def instrumented(
        self,
        backend: Backend,
        wrap: WrapLinear,
        wrap_embedding: Callable[[Embedding], Embedding],
        wrap_group: Callable[[TensorParallelGroup], TensorParallelGroup],
    ) -> Decoder:
        """The same model, sharing its weights, with other objects in the way of its ops.

        What the ranks do together in the embedding and the head belongs to these.
        """
        clone = copy.copy(self)
        if self._group.size > 1:
            clone._group = wrap_group(self._group)
        clone._backend = backend
        clone._stack = None
        clone._embed = wrap_embedding(self._embed)
        clone._head = wrap(self._head, "head", None)
        clone._layers = [
            replace(
                layer,
                qkv=wrap(layer.qkv, "qkv", index),
                output=wrap(layer.output, "output", index),
                mlp=layer.mlp.instrumented(backend, wrap, index),
            )
            for index, layer in enumerate(self._layers)
        ]
        return clone

    @property
    def num_weight_bytes(self) -> int:
        """Memory of all weight matrices in their stored form."""
        linears = [self._head]
        for layer in self._layers:
            linears += [layer.qkv, layer.output, *layer.mlp.linears()]
        return self._embed.num_bytes + sum(linear.num_bytes for linear in linears)

    def forward(
        self, batch: BatchInputs, on_kv_written: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Compute the batch, write its KV, and return logits of its sampled rows, [N, V].

        Of several ranks all must be given the same batch, and rank 0 alone has the logits.

        ``on_kv_written`` is called with each layer's index once the batch's KV of it is in place.
        """
        return self.compute(self._backend.begin_step(batch), on_kv_written)

    def compute(
        self, step: StepInputs, on_kv_written: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """``forward`` of a step that the backend has begun."""
        backend, config = self._backend, self.config
        eps = config.rms_norm_eps
        residual = self._embed(step.token_ids)
        if config.embedding_scale != 1.0:
            residual *= config.embedding_scale
        if self._stack is None:
            branch = self._run_layers(residual, step, on_kv_written)
        else:
            branch = self._stack.run(residual, step, on_kv_written)
        rows = step.sample_rows
        hidden = backend.add_rms_norm(branch[rows], residual[rows], self._norm, eps)
        logits = self._head(hidden)
        if config.final_logit_softcap:
            logits = config.final_logit_softcap * torch.tanh(logits / config.final_logit_softcap)
        return logits

    def _run_layers(
        self,
        residual: torch.Tensor,
        step: StepInputs,
        on_kv_written: Callable[[int], None] | None,
    ) -> torch.Tensor:
        """Op by op; what it returns is still to be added to ``residual``."""
        backend, config = self._backend, self.config
        eps, softcap = config.rms_norm_eps, config.attn_logit_softcap or 0.0
        hidden = backend.rms_norm(residual, self._layers[0].attention_norm, eps)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(hidden)
            backend.rope_and_write_kv(qkv, layer.rope, layer.qk_norm, index, step)
            if on_kv_written is not None:
                on_kv_written(index)
            attended = backend.paged_attention(
                qkv, index, config.query_scale, layer.window, step, softcap
            )
            branch = self._group.all_reduce(layer.output(attended))
            if layer.post_attention_norm is not None:
                branch = backend.rms_norm(branch, layer.post_attention_norm, eps)
            hidden = backend.add_rms_norm(branch, residual, layer.mlp_norm, eps)
            branch = self._group.all_reduce(layer.mlp(hidden))
            if layer.post_mlp_norm is not None:
                branch = backend.rms_norm(branch, layer.post_mlp_norm, eps)
            if index < last:
                norm = self._layers[index + 1].attention_norm
                hidden = backend.add_rms_norm(branch, residual, norm, eps)
        return branch

    def _layer_stack(self) -> LayerStack | None:
        """What runs all layers at once, if they are plain and one rank has them whole."""
        layers, config = self._layers, self.config
        first = layers[0]
        dense = [
            DenseLayer(
                x.attention_norm, x.qkv, x.qk_norm, x.output, x.mlp_norm, x.mlp.gate_up, x.mlp.down
            )
            for x in layers
            if isinstance(x.mlp, GatedMlp)
            and x.post_attention_norm is None
            and x.post_mlp_norm is None
            and x.rope is first.rope
            and x.window == first.window
        ]
        if len(dense) < len(layers) or self._group.size > 1 or config.attn_logit_softcap:
            return None
        form = LayerForm(
            eps=config.rms_norm_eps,
            rope=first.rope,
            scale=config.query_scale,
            window=first.window,
            activation=config.hidden_act,
            head_dim=config.head_dim,
            num_kv_heads=config.num_kv_heads,
        )
        return self._backend.layer_stack(dense, form)

    def _load_layer(self, source: WeightSource, index: int, rope: RopeTable) -> DecoderLayer:
        config = self.config
        prefix = f"model.layers.{index}."
        attention = f"{prefix}self_attn."
        qk_norm = None
        if config.qk_norm:
            qk_norm = QKNorm(
                self._load_norm(source, f"{attention}q_norm"),
                self._load_norm(source, f"{attention}k_norm"),
                config.rms_norm_eps,
            )
        post_attention = post_mlp = None
        mlp_norm = self._load_norm(source, f"{prefix}post_attention_layernorm")
        if config.post_norms:
            post_attention = mlp_norm
            mlp_norm = self._load_norm(source, f"{prefix}pre_feedforward_layernorm")
            post_mlp = self._load_norm(source, f"{prefix}post_feedforward_layernorm")
        sliding = config.layer_types[index] == "sliding_attention"
        names = [f"{attention}{part}_proj" for part in "qkv"]
        return DecoderLayer(
            attention_norm=self._load_norm(source, f"{prefix}input_layernorm"),
            qkv=self._load_linear(source, names, bias=config.attention_bias),
            qk_norm=qk_norm,
            rope=rope,
            window=(config.sliding_window or 0) if sliding else 0,
            output=self._load_linear(
                source, [f"{attention}o_proj"], bias=config.attention_out_bias
            ),
            post_attention_norm=post_attention,
            mlp_norm=mlp_norm,
            mlp=self._load_mlp(source, f"{prefix}mlp."),
            post_mlp_norm=post_mlp,
        )

    def _load_mlp(self, source: WeightSource, prefix: str) -> GatedMlp | MoeMlp:
        config = self.config
        if not config.num_experts:
            return self._load_gated(source, prefix)
        return MoeMlp(
            router=self._backend.router(source.get(f"{prefix}gate.weight")),
            experts=[
                self._load_gated(source, f"{prefix}experts.{expert}.")
                for expert in range(config.num_experts)
            ],
            num_experts_per_tok=config.num_experts_per_tok,
            norm_topk_prob=config.norm_topk_prob,
        )

    def _load_gated(self, source: WeightSource, prefix: str) -> GatedMlp:
        return GatedMlp(
            backend=self._backend,
            activation=self.config.hidden_act,
            gate_up=self._load_linear(source, [f"{prefix}gate_proj", f"{prefix}up_proj"]),
            down=self._load_linear(source, [f"{prefix}down_proj"]),
        )

    def _load_linear(self, source: WeightSource, names: list[str], *, bias: bool = False) -> Linear:
        """One product for several matrices that read the same input, stacked by rows."""
        weight = torch.cat([source.get(f"{name}.weight") for name in names])
        biases = torch.cat([source.get(f"{name}.bias") for name in names]) if bias else None
        return self._backend.linear(weight, biases)

    def _load_norm(self, source: WeightSource, name: str) -> torch.Tensor:
        weight = source.get(f"{name}.weight").to(self._backend.device)
        return weight + 1.0 if self.config.norm_plus_one else weight
