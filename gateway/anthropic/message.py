"""The ``message`` object of the Messages API, whole and as a stream.

message_start  ping
  content_block_start  content_block_delta …  content_block_stop    each text, each call
message_delta  message_stop                                         or error
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

from gateway.anthropic.error import error_body
from gateway.generation.answer import Answer
from gateway.generation.choice import Choice, Delta
from gateway.generation.parts import AnswerParts, AnswerText, Change, Closed, Grown, Opened, Part
from gateway.generation.usage import usage
from mesh.errors import PdmeshError


class MessageObject:
    """Writes the answer to one request."""

    def __init__(self, answer: Answer, *, model: str, max_tokens: int) -> None:
        """Args: max_tokens: What the client allows; the context may end before."""
        self._answer = answer
        self._model = model
        self._max_tokens = max_tokens

    def whole(self, parts: list[Part]) -> dict[str, Any]:
        """After the last token."""
        return {
            **self._head([_whole_block(part) for part in parts]),
            **self.end(),
            "usage": self.usage(usage(self._answer.choices, 1)),
        }

    def begun(self) -> dict[str, Any]:
        """With the first token."""
        counts = self.usage(usage(self._answer.choices, 1))
        return {
            **self._head([]),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": counts | {"output_tokens": 1},
        }

    def end(self) -> dict[str, Any]:
        """Why the answer ended."""
        choice = self._answer.choices[0]
        found = choice.stop_string
        match choice.finish_reason:
            case "length" if choice.num_tokens < self._max_tokens:
                reason = "model_context_window_exceeded"
            case "length":
                reason = "max_tokens"
            case "tool_calls":
                reason, found = "tool_use", None
            case _:
                reason = "end_turn" if found is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": found}

    def usage(self, counts: Mapping[str, Any]) -> dict[str, Any]:
        """``usage`` under this API's names, where cached tokens are no input tokens."""
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counts["completion_tokens"],
        }

    def _head(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._answer.id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
        }


class MessageEvents:
    """Formats one stream: ``gateway.sse.Chunks``."""

    def __init__(self, message: MessageObject) -> None:
        self._message = message
        self._parts = AnswerParts()
        self._is_begun = False

    def token(self, choice: Choice, delta: Delta, usage: dict[str, Any] | None) -> bytes:
        """A token that adds nothing visible has no event."""
        data = bytearray()
        if not self._is_begun:
            self._is_begun = True
            data += _event("message_start", message=self._message.begun()) + _event("ping")
        for change in self._parts.add(delta):
            data += _change(change)
        return bytes(data)

    def end(self, usage: dict[str, Any]) -> bytes:
        counts = self._message.usage(usage)
        end = _event("message_delta", delta=self._message.end(), usage=counts)
        return end + _event("message_stop")

    def timing(self, timing: list[dict[str, Any]]) -> bytes:
        """This API's streams have no event for it."""
        return b""

    def error(self, error: PdmeshError) -> bytes:
        return b"event: error\ndata: " + orjson.dumps(error_body(error)) + b"\n\n"


def _change(change: Change) -> bytes:
    is_text = isinstance(change.part, AnswerText)
    match change:
        case Opened(index=index, part=part):
            return _event("content_block_start", index=index, content_block=_block(part))
        case Grown(index=index, piece=piece):
            delta = (
                {"type": "text_delta", "text": piece}
                if is_text
                else {"type": "input_json_delta", "partial_json": piece}
            )
            return _event("content_block_delta", index=index, delta=delta)
        case Closed(index=index):
            return _event("content_block_stop", index=index)


def _block(part: Part) -> dict[str, Any]:
    """An empty block."""
    if isinstance(part, AnswerText):
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}


def _whole_block(part: Part) -> dict[str, Any]:
    if isinstance(part, AnswerText):
        return {"type": "text", "text": part.text}
    return {**_block(part), "input": _input(part.arguments)}


def _input(arguments: str) -> Any:
    """The arguments; nothing, where the answer was cut off within them."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {}


def _event(kind: str, **fields: Any) -> bytes:
    return (
        b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"
    )
