"""Finds tool calls in text that arrives in pieces.

What comes out does not depend on how the text is cut. Text that looks like a call and is none (no
valid JSON, no known function) comes out as content, so nothing is lost. A call is therefore held
back until it is whole, except where a grammar guarantees that it will be: then its arguments
stream.

    content  "I will look.  <tool_call>\\n{"name": "f", "arguments": {"x": 1}}\\n</tool_call>"
             └────┬─────┘└┬┘└───┬──────┘└─────────────┬────────────────────┘└────┬─────────┘
               content  gap   trigger                call                     closing
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from gateway.tools.format import ToolFormat

_ID_CHARS = string.ascii_letters + string.digits
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """What a piece of text adds to a call; ``id`` and ``name`` come once, with the first."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


class Parsed(NamedTuple):
    """What a piece of text turned into: content, and then calls."""

    content: str
    calls: tuple[ToolCallPiece, ...]


class ToolCallParser:
    """Parses one answer."""

    def __init__(
        self,
        tool_format: ToolFormat,
        names: Collection[str],
        *,
        guaranteed: bool = False,
        max_calls: int | None = None,
    ) -> None:
        """Expect calls.

        Args:
            tool_format: how they are written.
            names: the functions there are.
            guaranteed: a grammar keeps every call whole: stream its arguments.
            max_calls: how many to take; then ``is_full``.
        """
        self.num_calls = 0
        """Calls begun so far."""
        self.is_full = False
        """All calls that may be made are whole: the rest of the text is not needed."""
        self._format = tool_format
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._guaranteed = guaranteed
        head = tool_format.head("\0").split("\0")
        self._head = re.compile(re.escape(head[0]) + '([^"]*)' + re.escape(head[1]))
        self._buffer = ""
        self._gap = ""
        """White space after content: dropped when a call follows."""
        self._raw = ""
        """What was taken of a possible call, in case it is none."""
        self._object = _ObjectEnd()
        self._in_list = False
        self._is_over = False
        self._content: list[str] = []
        self._calls: list[ToolCallPiece] = []
        self._state = self._start if tool_format.is_whole_answer else self._text

    def push(self, text: str) -> Parsed:
        """Take the next piece."""
        if self.is_full:
            return Parsed("", ())
        self._buffer += text
        return self._run()

    def finish(self) -> Parsed:
        """The text is over: what was held back."""
        if self.is_full:
            return Parsed("", ())
        self._is_over = True
        parsed = self._run()
        rest = self._raw + self._buffer
        self._raw = self._buffer = ""
        if rest:
            self._show(rest)
        gap = "" if self.num_calls else self._gap
        self._gap = ""
        return Parsed(parsed.content + self._taken_content() + gap, parsed.calls)

    def _run(self) -> Parsed:
        while not self.is_full and self._state():
            pass
        content = self._taken_content()
        calls, self._calls = tuple(self._calls), []
        return Parsed(content, calls)

    def _taken_content(self) -> str:
        content, self._content = "".join(self._content), []
        return content

    # Each state takes from the buffer and returns whether to go on at once.

    def _start(self) -> bool:
        """Before the first character of an answer that may be a call as a whole."""
        self._skip_space()
        if not self._buffer:
            return False
        begins = self._buffer[0] == "{"
        return self._go(self._call if begins else self._text)

    def _text(self) -> bool:
        trigger = self._format.trigger
        before, found, after = self._buffer.partition(trigger)
        if found:
            self._show(before)
            self._raw, self._buffer = trigger, after
            return self._go(self._open)
        keep = 0 if self._is_over else _overlap(self._buffer, trigger)
        cut = len(self._buffer) - keep
        self._show(self._buffer[:cut])
        self._buffer = self._buffer[cut:]
        return False

    def _open(self) -> bool:
        """After the trigger: the first call, or the list of calls."""
        self._skip_space()
        if not self._buffer:
            return False
        wants_list = self._format.opening.endswith("[")
        if wants_list and self._buffer[0] == "[":
            self._take(1)
            self._in_list = True
            return self._go(self._first_in_list)
        return self._go(self._call if not wants_list else self._no_call)

    def _first_in_list(self) -> bool:
        self._skip_space()
        return bool(self._buffer) and self._go(self._call)

    def _call(self) -> bool:
        """At what should be the ``{`` of a call."""
        if self._buffer[0] != "{":
            return self._go(self._no_call)
        self._object = _ObjectEnd()
        return self._go(self._guaranteed_head if self._guaranteed else self._whole_call)

    def _whole_call(self) -> bool:
        end = self._object.find(self._buffer)
        if end is None:
            return False
        call = _read_call(self._buffer[:end], self._format.arguments_key)
        if call is None or call[0] not in self._names:
            self._take(end)
            return self._go(self._no_call)
        self._buffer = self._buffer[end:]
        self._begin(call[0])
        self._calls.append(ToolCallPiece(self.num_calls - 1, call[1]))
        return self._end()

    def _guaranteed_head(self) -> bool:
        match = self._head.match(self._buffer)
        if match is None:
            return False
        self._buffer = self._buffer[match.end() :]
        self._begin(match[1])
        return self._go(self._arguments)

    def _arguments(self) -> bool:
        """Inside the arguments of a guaranteed call; they are an object."""
        end = self._object.find(self._buffer)
        piece = self._buffer if end is None else self._buffer[:end]
        self._buffer = self._buffer[len(piece) :]
        self._object.rebase()
        if piece:
            self._calls.append(ToolCallPiece(self.num_calls - 1, piece))
        return end is not None and self._go(self._last_brace)

    def _last_brace(self) -> bool:
        if not self._buffer:
            return False
        self._buffer = self._buffer.removeprefix("}")
        return self._end()

    def _between(self) -> bool:
        """After a call: its closing, a separator and the next, or text."""
        self._skip_space()
        form = self._format
        closing = form.call_closing.strip() or form.closing
        separator = form.separator.strip()
        for mark, after in ((closing, self._text), (separator, self._after_separator)):
            if not mark or (mark == separator and not self._may_continue()):
                continue
            if self._buffer.startswith(mark):
                self._buffer = self._buffer[len(mark) :]
                return self._go(after)
            if mark.startswith(self._buffer):
                if self._is_over:
                    self._buffer = ""  # cut off inside it
                return False
        return self._go(self._text)

    def _after_separator(self) -> bool:
        self._raw = self._format.separator.strip()
        self._skip_space()
        return bool(self._buffer) and self._go(self._call)

    def _may_continue(self) -> bool:
        return self._in_list or self._format.is_whole_answer

    def _no_call(self) -> bool:
        """What was taken is content; what follows is text again."""
        self._show(self._raw)
        self._raw = ""
        self._in_list = False
        return self._go(self._text)

    def _begin(self, name: str) -> None:
        self._gap = self._raw = ""
        form = self._format
        random = "".join(secrets.choice(_ID_CHARS) for _ in range(form.id_chars))
        call_id = random if form.id_chars == 9 else f"call_{random}"
        self._calls.append(ToolCallPiece(self.num_calls, "", call_id, name))
        self.num_calls += 1

    def _end(self) -> bool:
        self.is_full = self._max_calls is not None and self.num_calls >= self._max_calls
        if self.is_full:
            self._buffer = ""
        return self._go(self._between)

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _take(self, size: int) -> None:
        self._raw += self._buffer[:size]
        self._buffer = self._buffer[size:]

    def _skip_space(self) -> None:
        rest = self._buffer.lstrip(_SPACE)
        space = self._buffer[: len(self._buffer) - len(rest)]
        if self._raw:
            self._raw += space
        else:
            self._gap += space
        self._buffer = rest

    def _show(self, text: str) -> None:
        """Content, but for the white space at its end, which waits for what follows."""
        shown = text.rstrip(_SPACE)
        if shown:
            self._content.append(self._gap + shown)
            self._gap = ""
        self._gap += text[len(shown) :]


class _ObjectEnd:
    """Finds the end of a JSON object in a growing buffer; looks at every character once."""

    __slots__ = ("_at", "_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._at = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, buffer: str) -> int | None:
        """Index after the closing brace of the object that ``buffer`` begins with, or None."""
        for index in range(self._at, len(buffer)):
            character = buffer[index]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        self._at = len(buffer)
        return None

    def rebase(self) -> None:
        """The caller took the whole buffer away; the object goes on in the next one."""
        self._at = 0


def _read_call(text: str, arguments_key: str) -> tuple[str, str] | None:
    """Name and arguments (JSON text of an object) of a whole call; None: it is none."""
    try:
        call = json.loads(text)
        name = call["name"]
        arguments = call[arguments_key]
        if isinstance(arguments, str):  # some models quote them
            arguments = json.loads(arguments)
        written = json.dumps(arguments, ensure_ascii=False)
    except (ValueError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, written


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that begins ``mark``."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
