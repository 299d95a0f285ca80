"""What one step computes, as the scheduler decided it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.sequence import Sequence


@dataclass(slots=True)
class ScheduledChunk:
    """``num_scheduled_tokens`` of one sequence, from its ``num_computed_tokens`` on."""

    sequence: Sequence
    num_scheduled_tokens: int
    start: int = field(init=False)
    """Position of the first of them."""
    samples: bool = field(init=False)
    """Whether this chunk ends at the sequence's last token, whose logits choose the next."""

    def __post_init__(self) -> None:
        """Note where the sequence stands: it may go on before this chunk's step is done."""
        self.start = self.sequence.num_computed_tokens
        self.samples = self.num_scheduled_tokens == self.sequence.num_uncomputed_tokens

    @property
    def end(self) -> int:
        """Tokens of the sequence whose KV is there once the chunk is computed."""
        return self.start + self.num_scheduled_tokens


@dataclass(slots=True)
class StepPlan:
    """One scheduling decision."""

    chunks: list[ScheduledChunk] = field(default_factory=list)
    reserved: list[Sequence] = field(default_factory=list)
    """Sequences that now hold blocks for KV from a prefill worker (state WAITING_FOR_KV)."""
    expired: list[Sequence] = field(default_factory=list)
    """Sequences past their deadline; already finished and freed."""
    shed: Sequence | None = None
    """Computed, but no decode worker has room for it, and its blocks are in the way of one that has
    a receiver. The caller gives it up; its blocks come back when its transfer has ended."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward computes."""
        return sum(chunk.num_scheduled_tokens for chunk in self.chunks)
