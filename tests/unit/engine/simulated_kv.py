"""What a KV cache would hold: each slot remembers which tokens its KV was computed from."""

from __future__ import annotations

from collections.abc import Callable

from engine.scheduling.step_plan import StepPlan
from engine.sequence import Sequence

Content = tuple[str, tuple[int, ...]]


class SimulatedKV:
    """Stands in for the model's forward: writes slots, and checks all that attention would read."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._slots: dict[tuple[int, int], Content | None] = {}

    def launch(self, plan: StepPlan) -> Callable[[], None]:
        """Note what the plan computes, and where; call the result when the device gets to it."""
        writes = [(chunk, list(chunk.sequence.block_table)) for chunk in plan.chunks]

        def compute() -> None:
            """Write the plan's tokens, then read every token that they attend to."""
            for chunk, table in writes:
                for position in range(chunk.start, chunk.end):
                    slot = table[position // self._block_size], position % self._block_size
                    is_known = position < chunk.sequence.num_tokens  # else its drawer has ended it
                    self._slots[slot] = _content(chunk.sequence, position) if is_known else None
            for chunk, _ in writes:
                if chunk.sequence.is_answering:
                    self.check(chunk.sequence, chunk.end)

        return compute

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
