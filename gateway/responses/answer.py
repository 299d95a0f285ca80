"""What POST /v1/responses answers with, typed for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gateway.answer_schema import AnswerBody, TokenLogprob
from gateway.responses.schema import ItemStatus


class OutputText(AnswerBody):
    """The content of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    """Always empty."""
    logprobs: list[TokenLogprob]


class OutputMessage(AnswerBody, tag="message"):
    """Text of the model."""

    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class OutputCall(AnswerBody, tag="function_call"):
    """A call of the model."""

    id: str
    call_id: str
    name: str
    arguments: str
    """JSON text."""
    status: ItemStatus


OutputItem = OutputMessage | OutputCall


class InputTokensDetails(AnswerBody):
    """Details of ``input_tokens``."""

    cached_tokens: int
    """Found in a prefix cache."""
    cache_write_tokens: int
    """Always 0: every prefix is cached, and none on request."""


class OutputTokensDetails(AnswerBody):
    """Details of ``output_tokens``."""

    reasoning_tokens: int
    """Always 0."""


class ResponseUsage(AnswerBody):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(AnswerBody):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(AnswerBody):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class Response(AnswerBody):
    """Answer of POST /v1/responses without ``stream``, and part of events."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    model: str
    store: bool
    """Always false: nothing can be retrieved later."""
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: dict[str, None]
    safety_identifier: str | None
    service_tier: str
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class _Event(AnswerBody):
    sequence_number: int


class ResponseCreated(_Event, tag="response.created"):
    """The first event."""

    response: Response


class ResponseInProgress(_Event, tag="response.in_progress"):
    """The second one."""

    response: Response


class OutputItemAdded(_Event, tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: OutputItem


class _ContentEvent(_Event):
    item_id: str
    output_index: int
    content_index: int


class ContentPartAdded(_ContentEvent, tag="response.content_part.added"):
    """The text of a message begins."""

    part: OutputText


class OutputTextDelta(_ContentEvent, tag="response.output_text.delta"):
    """A piece of text."""

    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(_ContentEvent, tag="response.output_text.done"):
    """The text is over."""

    text: str
    logprobs: list[TokenLogprob]


class ContentPartDone(_ContentEvent, tag="response.content_part.done"):
    """The same again."""

    part: OutputText


class FunctionArgumentsDelta(_Event, tag="response.function_call_arguments.delta"):
    """A piece of a call's arguments."""

    item_id: str
    output_index: int
    delta: str


class FunctionArgumentsDone(_Event, tag="response.function_call_arguments.done"):
    """The arguments are over."""

    item_id: str
    output_index: int
    name: str
    arguments: str


class OutputItemDone(_Event, tag="response.output_item.done"):
    """An item is over."""

    output_index: int
    item: OutputItem


class ResponseCompleted(_Event, tag="response.completed"):
    """The last event."""

    response: Response


class ResponseIncomplete(_Event, tag="response.incomplete"):
    """The last event where ``max_output_tokens`` or the context ended the answer."""

    response: Response


class ResponseFailed(_Event, tag="response.failed"):
    """The last event where the answer failed after the first byte."""

    response: Response


EVENTS: tuple[type[msgspec.Struct], ...] = (
    ResponseCreated,
    ResponseInProgress,
    OutputItemAdded,
    ContentPartAdded,
    OutputTextDelta,
    OutputTextDone,
    ContentPartDone,
    FunctionArgumentsDelta,
    FunctionArgumentsDone,
    OutputItemDone,
    ResponseCompleted,
    ResponseIncomplete,
    ResponseFailed,
)
