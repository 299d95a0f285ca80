"""One choice of an answer: a generation's tokens turned into text, until it stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gateway.detokenizer import Detokenizer
from gateway.generation import Generation
from gateway.request_metrics import RequestMetrics
from gateway.stop_strings import StopMatcher
from mesh.messages import FinishReason, TokenLogprobs


class Delta(NamedTuple):
    """What one token adds to a choice."""

    text: str
    """Visible text that became complete; often "" ."""
    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None


class Choice:
    """Reads one generation; stops it when a stop string completes."""

    def __init__(
        self,
        index: int,
        generation: Generation,
        pieces: Sequence[bytes],
        request_metrics: RequestMetrics,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        prefix: str = "",
        unfinished: bytes = b"",
    ) -> None:
        """Prepare.

        Args:
            index: Position in the answer's ``choices``.
            generation: Where the tokens come from.
            pieces: ``Tokenizer.pieces``.
            request_metrics: Hears about the end.
            stops: Stop strings.
            include_stop: Keep the stop string in the text.
            prefix: Text shown before the first token (``echo``).
            unfinished: First bytes of a character that the prompt leaves to the output.
        """
        self.index = index
        self.generation = generation
        self.num_tokens = 0
        """Output tokens, the one that ended it included."""
        self.finish_reason: FinishReason | None = None
        self._metrics = request_metrics
        self._detokenizer = Detokenizer(pieces, unfinished)
        self._matcher = StopMatcher(stops, include=include_stop) if stops else None
        self._min_tokens = generation.request.sampling.min_tokens
        self._prefix = prefix

    def read(self) -> list[Delta]:
        """One delta for every token that arrived since the last call, the last one finished.

        Raises:
            PdmeshError: the generation failed, and everything before was read.
        """
        outputs = self.generation.take()
        if not outputs:
            if self.generation.error is not None and self.finish_reason is None:
                raise self.generation.error
            return []
        deltas: list[Delta] = []
        for output in outputs:
            last = len(output.token_ids) - 1
            logprobs = output.logprobs
            for position, token_id in enumerate(output.token_ids):
                if self.finish_reason is not None:
                    return deltas
                reason = output.finish_reason if position == last else None
                entry = logprobs[position] if position < len(logprobs) else None
                deltas.append(self._delta(token_id, reason, entry))
        return deltas

    def abandoned(self) -> None:
        """The client left before the last token."""
        self._metrics.on_finished("abort")

    def _delta(
        self, token_id: int, reason: FinishReason | None, logprobs: TokenLogprobs | None
    ) -> Delta:
        self.num_tokens += 1
        # The token that stopped it is not part of the text.
        text = "" if reason == "stop" else self._detokenizer.push(token_id)
        if reason is not None:
            text += self._detokenizer.finish()
        if self._matcher is not None and self.num_tokens > self._min_tokens:
            text, stopped = self._matcher.push(text)
            if stopped:
                reason = "stop"
                self.generation.close()
            elif reason is not None:
                text += self._matcher.finish()
        if self._prefix:
            text, self._prefix = self._prefix + text, ""
        if reason is not None:
            self.finish_reason = reason
            self._metrics.on_finished(reason)
        return Delta(text, token_id, reason, logprobs)
