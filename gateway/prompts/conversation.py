"""Turns of other APIs' conversations into chat messages, and back to what their client wrote.

client's list                        chat messages
input[0]  message, user         ──▶  messages[0]
input[1]  message, assistant    ──▶  messages[1]                    one turn of the model:
input[2]  function_call         ──▶  messages[1].tool_calls[0]      its text and its calls
input[3]  function_call_output  ──▶  messages[2]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from gateway.request.schema import ChatMessage, TextPart
from gateway.request.tool_fields import CalledFunction, ToolCall
from mesh.errors import InvalidRequest

MAX_MESSAGES = 4096
MAX_PARTS = 1 << 14
"""Texts of one request; they are turned on the event loop, about 2 µs each."""

Role = Literal["system", "developer", "user", "assistant"]


class FieldNames:
    """What a client calls the fields of the chat request that its own became."""

    def __init__(self, names: dict[str, str]) -> None:
        """Args: names: Chat field → the client's; longer paths go before shorter ones."""
        self._names = names

    def add(self, chat_path: str, path: str) -> None:
        """Add a field."""
        self._names[chat_path] = path

    def rename(self, error: InvalidRequest) -> None:
        """Make ``error`` name the client's field, in its message too."""
        old = error.param
        if old is None:
            return
        name = self._named(old)
        error.param = name
        error.args = (re.sub(rf"(?<![\w.]){re.escape(old)}(?!\w)", lambda _: name, str(error)),)

    @contextmanager
    def renamed(self) -> Iterator[None]:
        """Have errors that leave the block name the client's fields."""
        try:
            yield
        except InvalidRequest as error:
            self.rename(error)
            raise

    def _named(self, path: str) -> str:
        end = len(path)
        while end > 0:
            if path[:end] in self._names:
                return self._names[path[:end]] + path[end:]
            end = max(path.rfind(".", 0, end), path.rfind("[", 0, end))
        return path


class Conversation:
    """Collects the messages of one request."""

    def __init__(self, names: FieldNames) -> None:
        """Args: names: Learns where each message comes from."""
        self.messages: list[ChatMessage] = []
        self._names = names
        self._num_parts = 0

    def add_text(
        self, role: Role, content: str | Sequence[str], path: str, *, join: bool = False
    ) -> None:
        """Add text to the conversation.

        Args:
            role: Who says it.
            content: One text, or its parts.
            path: The client's field.
            join: It goes on with the turn before, where that is of the same role.
        """
        parts = [content] if isinstance(content, str) else content
        self._num_parts += len(parts)
        if self._num_parts > MAX_PARTS:
            raise InvalidRequest(f"{path}: more than {MAX_PARTS} texts", param=path)
        last = self._last(role) if join else None
        if last is None or last.tool_calls:
            whole = content if isinstance(content, str) else _text_parts(parts)
            self._append(ChatMessage(role=role, content=whole), path)
            return
        if not isinstance(last.content, list):
            last.content = _text_parts([last.content] if last.content else [])
        last.content += _text_parts(parts)

    def add_call(self, call_id: str, name: str, arguments: str, path: str, field: str) -> None:
        """Add a call to the model's turn.

        Args:
            call_id: Its id.
            name: The function.
            arguments: JSON text.
            path: The client's item.
            field: Its field with the arguments.
        """
        last = self._last("assistant")
        if last is None:
            last = ChatMessage(role="assistant")
            self._append(last, path)
        calls = last.tool_calls = last.tool_calls or []
        position = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self._names.add(position, path)
        self._names.add(f"{position}.function.arguments", f"{path}.{field}")
        calls.append(ToolCall(id=call_id, function=CalledFunction(name=name, arguments=arguments)))

    def add_result(self, call_id: str, content: str | Sequence[str], path: str) -> None:
        """Add what a call returned."""
        whole = content if isinstance(content, str) else _text_parts(content)
        self._append(ChatMessage(role="tool", content=whole, tool_call_id=call_id), path)

    def _last(self, role: Role) -> ChatMessage | None:
        if self.messages and self.messages[-1].role == role:
            return self.messages[-1]
        return None

    def _append(self, message: ChatMessage, path: str) -> None:
        if len(self.messages) >= MAX_MESSAGES:
            raise InvalidRequest(f"{path}: more than {MAX_MESSAGES} messages", param=path)
        self._names.add(f"messages[{len(self.messages)}]", path)
        self.messages.append(message)


def _text_parts(texts: Sequence[str]) -> list[TextPart]:
    return [TextPart(type="text", text=text) for text in texts]
