"""The body of POST /v1/responses, as OpenAI has it, for servers that keep no state."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from gateway.errors import UnsupportedParameter
from gateway.request.decoding import decode_body
from gateway.request.schema import Metadata, ServiceTier
from gateway.request.tool_fields import ToolName
from mesh.errors import InvalidRequest

CallId = Annotated[str, Meta(min_length=1, max_length=256)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ContentPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One part of a message's content, or of what a function returned."""

    type: Literal["input_text", "output_text", "reasoning_text"]
    """The last one of reasoning only."""
    text: str
    annotations: list[Any] | None = None
    """Left in answers that are sent back, as the next one; not read."""
    logprobs: list[Any] | None = None


Content = str | Annotated[list[ContentPart], Meta(max_length=4096)]


class InputItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One item of ``input``; which fields it has depends on its type."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    """Left by an earlier answer, as ``status``; not read."""
    status: ItemStatus | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    """Of a message, as the next two."""
    content: Content | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    """Not read."""
    call_id: CallId | None = None
    """Of a call and of its output."""
    name: ToolName | None = None
    """Of a call, as the next one."""
    arguments: str | None = None
    """JSON text of an object."""
    namespace: None = None
    output: Content | None = None
    """What the function returned."""
    summary: list[Any] | None = None
    """Of reasoning, as the next one; reasoning of other models is left out of the prompt."""
    encrypted_content: str | None = None


_NEEDED: dict[str, frozenset[str]] = {
    "message": frozenset({"role", "content"}),
    "function_call": frozenset({"call_id", "name", "arguments"}),
    "function_call_output": frozenset({"call_id", "output"}),
    "reasoning": frozenset(),
}
_ALLOWED: dict[str, frozenset[str]] = {
    "message": frozenset({"phase"}),
    "function_call": frozenset(),
    "function_call_output": frozenset({"name"}),
    "reasoning": frozenset({"summary", "content", "encrypted_content"}),
}
_ANY_ITEM = {"type", "id", "status"}


class FunctionTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None
    """Arguments follow the schema whenever the function is called; not given: false."""


class FunctionChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``tool_choice`` that names the function to call."""

    type: Literal["function"]
    name: ToolName


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the text of the answer looks like."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    """With ``json_schema``, as the next ones."""
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    """The schema is enforced either way."""
    description: str | None = None


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The field ``text``."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Only what asks for no reasoning."""

    effort: Literal["none"] | None = None
    summary: Literal["auto"] | None = None
    """There is no reasoning that could be summed up."""


class ResponseStreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The field ``stream_options``."""

    include_obfuscation: Literal[False] | None = None
    """Only false: events are never padded."""


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/responses."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=4096)]
    model: str | None = None
    instructions: str | None = None
    """Goes before ``input`` as a system message."""
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: (
        Annotated[
            list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
            Meta(max_length=16),
        ]
        | None
    ) = None
    """Log-probabilities; encrypted reasoning has no effect, since there is none."""
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Needs ``message.output_text.logprobs`` in ``include``."""
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: ServiceTier | None = None
    metadata: Metadata | None = None
    """Shown in the answer; nothing is stored."""
    user: str | None = None
    """No effect, as the next ones: nothing is stored, and every prefix is cached for all."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = None
    client_metadata: dict[str, str] | None = None
    """What Codex says of itself."""

    not_served: ClassVar[tuple[str, ...]] = (
        *("store", "previous_response_id", "conversation", "background", "background_options"),
        *("prompt", "max_tool_calls", "context_management", "moderation", "image"),
        *("access_programs", "prompt_cache_options"),
    )


_decoder = msgspec.json.Decoder(ResponsesRequest)


def decode_responses_request(body: bytes) -> ResponsesRequest:
    """Decode and validate.

    Raises:
        InvalidRequest: not JSON, a wrong type or value, or a field that is not served.
    """
    request = decode_body(body, _decoder, ResponsesRequest)
    if isinstance(request.input, list):
        for index, item in enumerate(request.input):
            _check_item(item, f"input[{index}]")
    form = request.text.format if request.text is not None else None
    if form is not None:
        _check_format(form)
    wants_logprobs = "message.output_text.logprobs" in (request.include or ())
    if request.top_logprobs and not wants_logprobs:
        raise InvalidRequest(
            "top_logprobs needs message.output_text.logprobs in include", param="top_logprobs"
        )
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream", param="stream_options")
    return request


def _check_item(item: InputItem, path: str) -> None:
    needed = _NEEDED[item.type]
    allowed = needed | _ALLOWED[item.type] | _ANY_ITEM
    for name in item.__struct_fields__:
        is_given = getattr(item, name) is not None
        if name in needed and not is_given:
            raise InvalidRequest(f"{path}.{name}: missing", param=f"{path}.{name}")
        if is_given and name not in allowed:
            raise InvalidRequest(
                f"{path}.{name}: not a field of {item.type}", param=f"{path}.{name}"
            )
    if item.type == "reasoning":
        return
    for name, content in (("content", item.content), ("output", item.output)):
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if part.type == "reasoning_text":
                param = f"{path}.{name}[{index}].type"
                raise InvalidRequest(f"{param}: only of reasoning", param=param)


def _check_format(form: TextFormat) -> None:
    if form.type == "json_schema":
        for name in ("name", "schema"):
            if getattr(form, name) is None:
                param = f"text.format.{name}"
                raise InvalidRequest(f"{param}: missing", param=param)
    elif form.schema is not None:
        param = "text.format.schema"
        raise UnsupportedParameter(f"{param}: not with type {form.type}", param=param)
