"""How many tokens a step may compute so that it ends in time, by this worker's own measured speed.

A step costs about ``fixed + tokens * each``: the weights are read once, every token adds its
arithmetic. Both parts are followed by normalised least mean squares (Haykin, Adaptive Filter
Theory, ch. 7): each measured step moves the prediction for its own size half of the way to what was
measured. Small steps move the fixed part, large ones the part of each token, so that steps of
decodes alone say nothing wrong about prompts. Neither part need be true for the limit to settle: it
rests only where steps of its size take the time allowed.
"""

from __future__ import annotations

_GAIN = 0.5
_EVEN_TOKENS = 32
"""Steps of so many tokens move both parts alike."""
_MOST_OVER = 3.0
"""A step counts as at most so many times its prediction: one that the machine has interrupted
at most doubles it."""
_UNMEASURED_TOKENS = 64
"""Of a step before any was measured."""


class StepPace:
    """Fed by the engine after each step, asked by the scheduler before the next. Has no clock."""

    def __init__(self, max_step_s: float, max_tokens: int) -> None:
        """Start without measurements.

        Args:
            max_step_s: time that a step should take at most; 0: any.
            max_tokens: of a step, whatever they cost.
        """
        self._max_step_s = max_step_s
        self._max_tokens = max_tokens
        self._has_measured = False
        self._fixed_s = 0.0
        self._each_s = 0.0

    def limit_tokens(self) -> int:
        """Tokens that a step may compute in the time allowed; at least one."""
        if not self._max_step_s:
            return self._max_tokens
        if not self._has_measured:
            return min(self._max_tokens, _UNMEASURED_TOKENS)
        left_s = self._max_step_s - self._fixed_s
        if left_s >= self._max_tokens * self._each_s:
            return self._max_tokens
        return max(1, int(left_s / self._each_s)) if left_s > 0 else 1

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of ``num_tokens`` took ``seconds``."""
        if not self._has_measured:
            self._has_measured = True
            self._each_s = seconds / num_tokens
            return
        predicted_s = self._fixed_s + num_tokens * self._each_s
        error_s = min(seconds, _MOST_OVER * predicted_s) - predicted_s
        size = num_tokens / _EVEN_TOKENS
        step_s = _GAIN * error_s / (1.0 + size * size)
        self._fixed_s = max(0.0, self._fixed_s + step_s)
        self._each_s = max(0.0, self._each_s + step_s * size / _EVEN_TOKENS)

    def forget(self) -> None:
        """Start again without measurements: those so far were of something else."""
        self._has_measured = False
        self._fixed_s = self._each_s = 0.0
