"""An answer as parts that follow each other: texts and tool calls.

The Responses API calls them output items, the Messages API content blocks. Both stream each part as
an opening, pieces and an end, and never two at a time:

    text  text  text │ call 1  arguments  arguments │ call 2  arguments │ text
    └──── part 0 ───┘ └────────── part 1 ──────────┘ └──── part 2 ─────┘ └─ part 3 …
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gateway.generation.choice import Delta
from gateway.tools.parser import ToolCallPiece
from mesh.messages import TokenLogprobs


@dataclass(slots=True)
class AnswerText:
    """Text between calls; never empty when it is over."""

    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the tokens behind the text, where they were asked for."""


@dataclass(slots=True)
class AnswerCall:
    """A tool call."""

    id: str
    name: str
    arguments: str = ""
    """JSON text; the beginning of one while the call is not whole."""


Part = AnswerText | AnswerCall


@dataclass(frozen=True, slots=True)
class Opened:
    """A part begins; it is empty so far."""

    index: int
    part: Part


@dataclass(frozen=True, slots=True)
class Grown:
    """A part got more."""

    index: int
    part: Part
    piece: str
    logprobs: Sequence[TokenLogprobs]
    """Of the tokens behind ``piece``, for text."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A part is over."""

    index: int
    part: Part


Change = Opened | Grown | Closed


class AnswerParts:
    """Turns the deltas of one choice into parts."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._is_open = False
        self._logprobs: list[TokenLogprobs] = []
        """Of tokens whose text has not come yet."""

    def add(self, delta: Delta) -> list[Change]:
        """Take what one token adds."""
        changes: list[Change] = []
        if delta.logprobs is not None:
            self._logprobs.append(delta.logprobs)
        calls = list(delta.calls)
        while calls and not calls[0].id:  # of a call that goes on: it stands before the text
            self._add_arguments(calls.pop(0), changes)
        if delta.text:
            part = self._open_text(changes)
            logprobs, self._logprobs = self._logprobs, []
            part.text += delta.text
            part.logprobs += logprobs
            changes.append(Grown(len(self.parts) - 1, part, delta.text, logprobs))
        for call in calls:
            if call.id:
                self._open(AnswerCall(call.id, call.name), changes)
            self._add_arguments(call, changes)
        if delta.finish_reason is not None:
            self._close(changes)
        return changes

    def _add_arguments(self, call: ToolCallPiece, changes: list[Change]) -> None:
        self._logprobs.clear()  # they are the call's
        if call.arguments:
            part = self.parts[-1]
            assert isinstance(part, AnswerCall), "arguments belong to the last call"
            part.arguments += call.arguments
            changes.append(Grown(len(self.parts) - 1, part, call.arguments, ()))

    def _open_text(self, changes: list[Change]) -> AnswerText:
        last = self.parts[-1] if self._is_open else None
        if isinstance(last, AnswerText):
            return last
        part = AnswerText()
        self._open(part, changes)
        return part

    def _open(self, part: Part, changes: list[Change]) -> None:
        self._close(changes)
        self.parts.append(part)
        self._is_open = True
        changes.append(Opened(len(self.parts) - 1, part))

    def _close(self, changes: list[Change]) -> None:
        if self._is_open:
            changes.append(Closed(len(self.parts) - 1, self.parts[-1]))
        self._is_open = False


def whole_parts(deltas: Iterable[Delta]) -> list[Part]:
    """The parts of a choice of which all deltas are there."""
    parts = AnswerParts()
    for delta in deltas:
        parts.add(delta)
    return parts.parts
