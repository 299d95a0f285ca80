"""One choice of an answer: a generation's tokens turned into text, until it stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from gateway.generation.detokenizer import Detokenizer
from gateway.generation.generation import Generation
from gateway.generation.stop_strings import StopMatcher
from gateway.observe.request_metrics import RequestMetrics
from gateway.tools.parser import Parsed, ToolCallParser, ToolCallPiece
from mesh.messages import FinishReason, TokenLogprobs

EndReason = FinishReason | Literal["tool_calls"]
"""Why a choice ended, as clients are told: ``tool_calls`` instead of ``stop`` after a call."""


class Delta(NamedTuple):
    """What one token adds to a choice."""

    text: str
    """Visible text that became complete; often "" ."""
    token_id: int
    finish_reason: EndReason | None
    logprobs: TokenLogprobs | None
    calls: tuple[ToolCallPiece, ...] = ()
    """What it adds to tool calls; they come after ``text``."""


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
        tools: ToolCallParser | None = None,
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
            tools: Finds tool calls in the text; None: it is all content.
        """
        self.index = index
        self.generation = generation
        self.num_tokens = 0
        """Output tokens, the one that ended it included."""
        self.finish_reason: EndReason | None = None
        self._metrics = request_metrics
        self._detokenizer = Detokenizer(pieces, unfinished)
        self._matcher = StopMatcher(stops, include=include_stop) if stops else None
        self._min_tokens = generation.request.sampling.min_tokens
        self._prefix = prefix
        self._tools = tools

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

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it."""
        return None if self._matcher is None else self._matcher.found

    def timing(self) -> dict[str, Any]:
        """Where its time went; call once it has finished."""
        return self._metrics.timing()

    def abandoned(self) -> None:
        """The client left before the last token."""
        self._metrics.on_finished("abort")

    def failed(self, code: str) -> None:
        """It ended with an error before the last token."""
        self._metrics.on_failed(code)

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
        calls: tuple[ToolCallPiece, ...] = ()
        end: EndReason | None = reason
        if self._tools is not None:
            (text, calls), end = self._parse(self._tools, text, reason)
        if end is not None:
            self.finish_reason = end
            self._metrics.on_finished(end)
        return Delta(text, token_id, end, logprobs, calls)

    def _parse(
        self, tools: ToolCallParser, text: str, reason: FinishReason | None
    ) -> tuple[Parsed, EndReason | None]:
        """Take calls out of ``text``; the last one that may be made ends the choice."""
        parsed = tools.push(text)
        if tools.is_full and reason is None:
            self.generation.close()
            return parsed, "tool_calls"
        if reason is not None:
            rest = tools.finish()
            parsed = Parsed(parsed.content + rest.content, parsed.calls + rest.calls)
        return parsed, "tool_calls" if reason == "stop" and tools.num_calls else reason
