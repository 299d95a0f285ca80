"""Embedding and output head with the vocabulary's rows split among the ranks.

token id    0 …… V/n  …… 2V/n ……  V      a rank looks its own ids up, has zeros for the others,
rank        |   0   |    1    | …         and the sum over the ranks is the embedding
"""

from __future__ import annotations

import torch

from engine.backend import Embedding, Linear
from engine.tensor_parallel.group import TensorParallelGroup
from engine.tensor_parallel.shard import ModelShard


class SplitEmbedding:
    """One rank's rows; a call is one all-reduce."""

    def __init__(self, rows: Embedding, shard: ModelShard, group: TensorParallelGroup) -> None:
        self._rows = rows
        self._start, self._stop = shard.vocab.start, shard.vocab.stop
        self._group = group
        self.num_bytes = rows.num_bytes

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 → [T, H], the same on every rank."""
        elsewhere = (token_ids < self._start) | (token_ids >= self._stop)
        embedded = self._rows((token_ids - self._start).masked_fill_(elsewhere, 0))
        embedded.masked_fill_(elsewhere[:, None], 0.0)
        return self._group.all_reduce(embedded)


class SplitHead:
    """One rank's rows; a call is one gather, and rank 0 has the logits."""

    def __init__(self, rows: Linear, shard: ModelShard, group: TensorParallelGroup) -> None:
        self._rows = rows
        self._vocab_size = shard.config.vocab_size
        self._group = group
        self.num_bytes = rows.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, H] → [N, V] on rank 0, nothing on the others; without rows nobody is asked."""
        if not len(x):
            return x.new_empty(0, self._vocab_size)
        parts = self._group.gather(self._rows(x))
        if not parts:
            return x.new_empty(0, self._vocab_size)
        logits = torch.cat(parts, dim=1)
        is_padded = logits.shape[1] > self._vocab_size
        return logits[:, : self._vocab_size].contiguous() if is_padded else logits
