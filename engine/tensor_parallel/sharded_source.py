"""A model's weights as one rank sees them: it reads its own slices and nothing else."""

from __future__ import annotations

import torch

from engine.tensor_parallel.shard import ModelShard
from engine.weights.source import WeightSource

_TABLES = ("model.embed_tokens.weight", "lm_head.weight")


class ShardedSource(WeightSource):
    """Slices of another source, which the caller closes."""

    def __init__(self, source: WeightSource, shard: ModelShard) -> None:
        self._source = source
        self._shard = shard

    def names(self) -> list[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        whole = self._source.shape(name)
        spans = self._shard.spans(name)[: len(whole)]
        own = [
            len(range(*span.indices(count)))
            for span, count in zip(spans, whole[: len(spans)], strict=True)
        ]
        if name in _TABLES:
            own[0] = self._shard.padded_vocab
        return *own, *whole[len(spans) :]

    def get(
        self, name: str, rows: slice = slice(None), columns: slice = slice(None)
    ) -> torch.Tensor:
        assert (rows, columns) == (slice(None), slice(None)), "a slice of a slice"
        shard = self._shard
        if shard.rank and shard.is_summed_bias(name):
            return torch.zeros(self._source.shape(name))
        weight = self._source.get(name, *shard.spans(name))
        missing = shard.padded_vocab - weight.shape[0] if name in _TABLES else 0
        if missing:
            return torch.nn.functional.pad(weight, (0, 0, 0, missing))
        return weight

    def content_hash(self) -> str:
        return self._source.content_hash()

    def bits_per_weight(self) -> float:
        return self._source.bits_per_weight()

    def close(self) -> None:
        """The source stays open."""
