"""Which of a model's KV heads a tensor-parallel rank holds: the rule of engine and hand-off.

4 KV heads, 2 ranks    |0 1|2 3|              2 KV heads, 4 ranks    |0|0|1|1|
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """KV heads ``start`` to ``stop`` (exclusive) of the whole model."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def bounds(self) -> tuple[int, int]:
        """As they go into a Grant."""
        return self.start, self.stop

    def overlap(self, other: Heads) -> Heads:
        """What both have; empty where they share nothing."""
        start = max(self.start, other.start)
        return Heads(start=start, stop=max(start, min(self.stop, other.stop)))

    def holds(self, other: Heads) -> bool:
        """Whether ``other`` is a non-empty part of this."""
        return self.start <= other.start < other.stop <= self.stop


def heads_of_rank(rank: int, tensor_parallel: int, num_heads: int) -> Heads:
    """What a rank owns; with more ranks than heads, neighbouring ranks hold the same head.

    Raises:
        ValueError: neither number divides the other.
    """
    if not 0 <= rank < tensor_parallel:
        raise ValueError(f"rank {rank} of {tensor_parallel}")
    if num_heads % tensor_parallel == 0:
        share = num_heads // tensor_parallel
        return Heads(start=rank * share, stop=(rank + 1) * share)
    if tensor_parallel % num_heads:
        raise ValueError(f"{num_heads} KV heads can't be divided among {tensor_parallel} ranks")
    head = rank * num_heads // tensor_parallel
    return Heads(start=head, stop=head + 1)
