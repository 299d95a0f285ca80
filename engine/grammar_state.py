"""One sequence's place in the grammar that its output must follow.

The state is a function of the grammar and the output tokens alone, so a replay, a preemption and
the hand-off between workers need nothing but the tokens.
"""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from mesh.errors import GrammarFailed
from mesh.messages import SamplingParams
from mesh.model_text.grammar import check


class GrammarState:
    """One sequence's place in its grammar. The threads of its ``GrammarManager`` write it."""

    __slots__ = ("_job", "_mask_at", "_matcher", "forbidden", "grammar", "num_consumed")

    def __init__(self, grammar: str) -> None:
        self.grammar = grammar
        self.forbidden: npt.NDArray[np.bool_] | None = None
        """[V], true for tokens that cannot come next; valid between collect and append."""
        self._job: Future[None] | None = None
        self._matcher: LLMatcher | None = None
        self.num_consumed = 0
        """Output tokens that the matcher has seen."""
        self._mask_at = -1

    @property
    def is_busy(self) -> bool:
        """Whether a thread works for it; until then the sequence takes no part in steps."""
        return self._job is not None and not self._job.done()

    def cancel(self) -> None:
        """The sequence is over: do not begin what waits for a thread."""
        if self._job is not None:
            self._job.cancel()

    def start(self, job: Future[None]) -> None:
        """Note the thread's work."""
        self._job = job

    def is_prepared_for(self, index: int) -> bool:
        """Whether the mask of output ``index`` is there, or can never be (compiling failed)."""
        failed = self._job is not None and self._job.done() and self._job.exception() is not None
        return failed or self._mask_at == index

    def result(self, timeout_s: float) -> None:
        """Wait for the thread.

        Raises:
            TimeoutError: it needs longer.
            GrammarFailed: it found that the sequence cannot go on.
        """
        assert self._job is not None
        self._job.result(timeout_s)

    def adopt(self, matcher: LLMatcher) -> None:
        """Begin at the start of the grammar (in the compiling thread)."""
        self._matcher = matcher

    def advance(self, tokens: list[int], num_tokens: int, sampling: SamplingParams) -> None:
        """Consume the output tokens that are new and fill ``forbidden`` (in the mask thread).

        Args:
            tokens: those after the first ``num_consumed``.
            num_tokens: V; the mask has one bit more, which says "may end here".
            sampling: the request's; its stop tokens end the answer.

        Raises:
            GrammarFailed: the tokens left the grammar, or a limit was hit.
        """
        matcher = self._matcher
        assert matcher is not None, "compiled before"
        if tokens and not matcher.consume_tokens(tokens):
            check(matcher)
        self.num_consumed += len(tokens)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        check(matcher)
        allowed = np.unpackbits(bits, count=num_tokens + 1, bitorder="little").astype(np.bool_)
        may_end = bool(allowed[num_tokens])
        allowed = allowed[:num_tokens]
        stops = list(sampling.stop_token_ids)
        if self.num_consumed < sampling.min_tokens:
            longer = allowed.copy()
            longer[stops] = False
            if longer.any():
                may_end, allowed = False, longer
        if may_end:
            allowed[stops] = True
        if not allowed.any():
            raise GrammarFailed("no token continues the output as the grammar demands")
        self.forbidden = ~allowed
        self._mask_at = self.num_consumed
