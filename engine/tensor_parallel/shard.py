"""What one rank holds of a model (Megatron-LM's split, Shoeybi et al., arXiv:1909.08053).

    q, k, v      by rows, whole heads       each rank attends with its own heads
    o            by columns, the same       its products are summed over the ranks: all-reduce
    gate, up     by rows                    also inside of every expert
    down         by columns, the same       all-reduce
    embedding,   by rows of the vocabulary, padded to a multiple of the ranks
    head
    norms, router, biases of nothing split  whole, on every rank

With more ranks than KV heads, neighbouring ranks hold the same KV head (``mesh.kv_heads``).
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.model_config import ModelConfig
from mesh.errors import ConfigError
from mesh.kv_heads import Heads, heads_of_rank

_EVERYTHING = slice(None)
_COLUMN_GROUPS = {"int8": 32, "int4": 32}
"""Consecutive inputs of a matrix that share a scale, by weight scheme."""


@dataclass(slots=True, frozen=True)
class ModelShard:
    """Spans of one rank; the spans of all ranks cover the model. Made by ``plan_shard``."""

    config: ModelConfig
    rank: int
    size: int
    kv_heads: Heads
    """Of the whole model."""

    @property
    def padded_vocab(self) -> int:
        """Rows of the rank's part of the embedding, padding included."""
        return -(-self.config.vocab_size // self.size)

    def span(self, count: int) -> slice:
        """The rank's equal part of ``count`` things."""
        share = count // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    @property
    def vocab(self) -> slice:
        """Token ids whose rows the rank holds."""
        start = min(self.rank * self.padded_vocab, self.config.vocab_size)
        return slice(start, min(start + self.padded_vocab, self.config.vocab_size))

    def spans(self, name: str) -> tuple[slice, slice]:
        """Rows and columns that the rank holds of a tensor; a vector has rows only."""
        config = self.config
        module, _, kind = name.rpartition(".")
        module = module.rpartition(".")[2]
        head_dim = config.head_dim
        inner = config.moe_intermediate_size if config.num_experts else config.intermediate_size
        match module:
            case "q_proj":
                return self.span(config.num_heads * head_dim), _EVERYTHING
            case "k_proj" | "v_proj":
                heads = self.kv_heads
                return slice(heads.start * head_dim, heads.stop * head_dim), _EVERYTHING
            case "o_proj" if kind == "weight":
                return _EVERYTHING, self.span(config.num_heads * head_dim)
            case "gate_proj" | "up_proj":
                return self.span(inner), _EVERYTHING
            case "down_proj":
                return _EVERYTHING, self.span(inner)
            case "embed_tokens" | "lm_head":
                return self.vocab, _EVERYTHING
        return _EVERYTHING, _EVERYTHING

    def is_summed_bias(self, name: str) -> bool:
        """Whether a bias is added to what the ranks sum: one of them may add it."""
        return name.endswith(".o_proj.bias")


def plan_shard(config: ModelConfig, rank: int, size: int, weights: str = "fp32") -> ModelShard:
    """Split a model among ``size`` ranks.

    Args:
        config: The model.
        rank: Whose part.
        size: Number of ranks; with 1 everything is whole.
        weights: Their scheme: no split may part the inputs of a matrix that share a scale.

    Raises:
        ConfigError: something can't be divided; shows the numbers.
    """
    if size > 1:
        check_divisible(config, size, weights)
    return ModelShard(config, rank, size, heads_of_rank(rank, size, config.num_kv_heads))


def check_divisible(config: ModelConfig, size: int, weights: str = "fp32") -> None:
    """Whether ``size`` ranks can share the model; arguments and errors as of ``plan_shard``."""
    column_group = _COLUMN_GROUPS.get(weights, 1)
    field = "tensor_parallel"
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % size:
        raise ConfigError(
            f"{field}: the model's {heads} attention heads can't be divided among {size} ranks: "
            f"{heads} = {heads // size} x {size} + {heads % size}"
        )
    if kv_heads % size and size % kv_heads:
        raise ConfigError(
            f"{field}: the model's {kv_heads} KV heads can't be divided among {size} ranks, nor "
            f"each be held by the same number of ranks: neither number divides the other"
        )
    inner, what = config.intermediate_size, "intermediate size"
    if config.num_experts:
        inner, what = config.moe_intermediate_size, "experts' intermediate size"
    if inner % size:
        raise ConfigError(
            f"{field}: the model's {what} {inner} can't be divided among {size} ranks: "
            f"{inner} = {inner // size} x {size} + {inner % size}"
        )
    attended = heads // size * config.head_dim
    for width, of in (
        (attended, f"attention: {heads} heads / {size} ranks x {config.head_dim}"),
        (inner // size, f"{what}: {inner} / {size} ranks"),
    ):
        if width % column_group:
            raise ConfigError(
                f"{field}: quantised weights are split in groups of {column_group} columns, and a "
                f"rank's part of the {of} = {width} is not a multiple of that; use fp32 weights "
                f"or another number of ranks"
            )
