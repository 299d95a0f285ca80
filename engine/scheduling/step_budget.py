"""Tokens that the step being planned may still compute, and how many of them a prompt may take."""

from __future__ import annotations

from engine.scheduling.step_pace import StepPace
from engine.sequence import Sequence

LEAST_PROMPT_TOKENS = 16
"""What prompts get of every step that has room, however slow the worker and whatever decodes."""


class StepBudget:
    """The scheduler's: ``begin``, decodes ``take``, ``begin_prompts``, prompts ``take``."""

    def __init__(self, max_tokens: int, batch_chunk_tokens: int, pace: StepPace | None) -> None:
        """Of every step.

        Args:
            max_tokens: most that one computes.
            batch_chunk_tokens: up to where batch prompts fill steps that are kept small.
            pace: bounds what prompts add to a step beside decodes; None: nothing but the above.
        """
        self.num_left = self._step_tokens = self._max_tokens = max_tokens
        self._batch_chunk_tokens = min(batch_chunk_tokens, max_tokens)
        self._pace = pace
        self._keep_small = False
        self._least_batch_chunk = 0

    def begin(self, *, keep_small: bool) -> None:
        """A step begins; interactive sequences take part in those that are kept small."""
        self.num_left = self._step_tokens = self._max_tokens
        self._keep_small = keep_small
        self._least_batch_chunk = max(1, self._batch_chunk_tokens // 8)

    def begin_prompts(self) -> None:
        """All decodes have taken theirs: leave prompts what the worker computes in time."""
        if self._pace is None:
            return
        num_decodes = self._step_tokens - self.num_left
        in_time = max(self._pace.limit_tokens(), num_decodes + LEAST_PROMPT_TOKENS)
        self._step_tokens = min(in_time, self._max_tokens)
        self.num_left = self._step_tokens - num_decodes

    def chunk_limit(self, sequence: Sequence) -> int:
        """Prompt tokens that this sequence may add to the step.

        Steps stay small while interactive sequences take part in them: then batch prompts fill them
        up to ``batch_chunk_tokens`` only. Where decodes alone reach that, the first batch prompt
        still gets an eighth of it: however many decode, it must end one day.
        """
        if sequence.slo_class == "interactive" or not self._keep_small:
            return self.num_left
        left = self._batch_chunk_tokens - (self._step_tokens - self.num_left)
        return min(self.num_left, max(left, self._least_batch_chunk))

    def take(self, sequence: Sequence, num_tokens: int) -> None:
        """The step computes ``num_tokens`` of this sequence."""
        self.num_left -= num_tokens
        if sequence.slo_class == "batch" and sequence.num_uncomputed_tokens > 1:
            self._least_batch_chunk = 0
