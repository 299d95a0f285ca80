"""What a KV cache would hold: each slot remembers which tokens its KV was computed from."""

from __future__ import annotations

from engine.scheduler import StepPlan
from engine.sequence import Sequence

Content = tuple[str, tuple[int, ...]]


class SimulatedKV:
    """Stands in for the model's forward: writes slots, and checks all that attention would read."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._slots: dict[tuple[int, int], Content | None] = {}

    def compute(self, plan: StepPlan) -> None:
        """Write the plan's tokens, then read every token that they attend to."""
        for chunk in plan.chunks:
            first = chunk.sequence.num_computed_tokens
            for position in range(first, first + chunk.num_scheduled_tokens):
                self.write(chunk.sequence, position)
        for chunk in plan.chunks:
            self.check(chunk.sequence, chunk.sequence.num_computed_tokens)

    def write(self, sequence: Sequence, position: int) -> None:
        """KV of one token, which depends on every token up to it."""
        self._slots[self._slot(sequence, position)] = _content(sequence, position)

    def spoil(self, blocks: list[int]) -> None:
        """A remote write of unknown content."""
        for block in blocks:
            for offset in range(self._block_size):
                self._slots[block, offset] = None

    def check(self, sequence: Sequence, num_tokens: int) -> None:
        """The first ``num_tokens`` tokens' KV is there and is this sequence's own."""
        for position in range(num_tokens):
            found = self._slots.get(self._slot(sequence, position))
            assert found == _content(sequence, position), (
                f"{sequence.transfer_id} reads foreign KV at position {position}"
            )

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.block_table[position // self._block_size], position % self._block_size


def _content(sequence: Sequence, position: int) -> Content:
    return sequence.cache_salt, tuple(sequence.token_ids[: position + 1])
