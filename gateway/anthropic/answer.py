"""What the Messages API answers with, typed for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gateway.answer_schema import AnswerBody

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class TokenCount(AnswerBody):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class MessageText(AnswerBody, tag="text"):
    """Text of the model."""

    text: str


class MessageToolUse(AnswerBody, tag="tool_use"):
    """A call of the model."""

    id: str
    name: str
    input: dict[str, Any]
    """Empty where a stream begins, and where the answer was cut off within it."""


MessageContent = MessageText | MessageToolUse


class MessageUsage(AnswerBody):
    """Token counts; cached tokens are not in ``input_tokens``."""

    input_tokens: int
    cache_creation_input_tokens: int
    """Always 0: every prefix is cached, and none on request."""
    cache_read_input_tokens: int
    output_tokens: int


class Message(AnswerBody):
    """Answer of POST /v1/messages without ``stream``, and part of the first event."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageContent]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(AnswerBody, tag="message_start"):
    """The first event."""

    message: Message


class Ping(AnswerBody, tag="ping"):
    """Nothing."""


class ContentBlockStart(AnswerBody, tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: MessageContent


class TextDelta(AnswerBody, tag="text_delta"):
    """A piece of text."""

    text: str


class InputJsonDelta(AnswerBody, tag="input_json_delta"):
    """A piece of a call's input."""

    partial_json: str


class ContentBlockDelta(AnswerBody, tag="content_block_delta"):
    """A block grows."""

    index: int
    delta: TextDelta | InputJsonDelta


class ContentBlockStop(AnswerBody, tag="content_block_stop"):
    """A block is over."""

    index: int


class MessageEnd(AnswerBody):
    """Why the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(AnswerBody, tag="message_delta"):
    """After the last block."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(AnswerBody, tag="message_stop"):
    """The last event."""


class MessageErrorDetails(AnswerBody):
    """What went wrong; the message names the field at fault."""

    type: Literal[
        "invalid_request_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "timeout_error",
        "api_error",
    ]
    message: str


class MessageError(AnswerBody, tag="error"):
    """Every answer that is not a success, and the last event of a stream that failed."""

    error: MessageErrorDetails


EVENTS: tuple[type[msgspec.Struct], ...] = (
    MessageStart,
    Ping,
    ContentBlockStart,
    ContentBlockDelta,
    ContentBlockStop,
    MessageDelta,
    MessageStop,
    MessageError,
)
