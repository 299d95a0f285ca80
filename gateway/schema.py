"""The OpenAI request bodies, typed, and decoded with errors that name the field.

Fields follow the OpenAI API plus vLLM's sampling extensions. A field that would change the output
and is not served is refused by name, unless its value asks for nothing (``null``, ``[]``, …);
other fields that are not known are ignored, as vLLM does.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from gateway.structured_fields import (
    ChoiceList,
    GrammarText,
    JsonSchema,
    ResponseFormat,
    StructuredOutputs,
)
from gateway.tool_fields import ToolCallList, ToolChoice, ToolList, check_tools
from mesh.errors import InvalidRequest
from mesh.messages import SloClass

MAX_STOP_STRINGS = 4
_MAX_SEED = (1 << 63) - 1

StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
StopList = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
ServiceTier = Literal["auto", "default", "priority", "scale", "interactive", "flex", "batch"]
"""OpenAI's tiers, and the two classes by their own names."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries besides tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """The fields that both endpoints take; None is "not given"."""

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-_MAX_SEED, le=_MAX_SEED)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: StopString | StopList | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    """The ``guided_`` fields are vLLM's older names of those in ``structured_outputs``."""
    guided_regex: GrammarText | None = None
    guided_choice: ChoiceList | None = None
    guided_grammar: GrammarText | None = None
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] = 0
    service_tier: ServiceTier | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def slo_class(self) -> SloClass:
        """Whether latency or throughput counts; ``flex`` and ``batch`` name the latter."""
        return "batch" if self.service_tier in ("flex", "batch") else "interactive"


class TextPart(msgspec.Struct, kw_only=True):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, kw_only=True):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: ToolCallList | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class ChatRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    tools: ToolList | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[Any]
    """A string, token ids, or a list of either."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool = False
    add_special_tokens: bool = True


_Request = TypeVar("_Request", ChatRequest, CompletionRequest)

_NOTHING: tuple[Any, ...] = (None, [], {}, "", False)
_REFUSED: dict[str, tuple[Any, ...]] = {
    name: _NOTHING
    for name in (
        *("tools", "functions", "suffix", "audio", "prediction", "web_search_options"),
        *("chat_template", "documents", "mm_processor_kwargs", "prompt_logprobs"),
        *("structural_tag", "logits_processors", "bad_words"),
        *("allowed_token_ids", "use_beam_search", "truncate_prompt_tokens", "prompt_embeds"),
        *("return_tokens_as_token_ids", "lora", "thinking_token_budget", "verbosity"),
    )
}
_REFUSED |= {
    "tool_choice": (None, "none", "auto"),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "reasoning_effort": (None, "none"),
    "length_penalty": (None, 1),
    "spaces_between_special_tokens": (None, True),
}
"""Field → values that ask for nothing."""

_ALSO_REFUSED: dict[type, tuple[str, ...]] = {
    ChatRequest: ("prompt", "echo", "suffix"),
    CompletionRequest: ("messages", "top_logprobs", "max_completion_tokens"),
}

_AT_PATH = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)


def decode_chat_request(body: bytes) -> ChatRequest:
    """Decode and validate; the error's ``param`` is the path of the field, ``messages[0].role``.

    Raises:
        InvalidRequest: not JSON, a wrong type or value, or a field that is not served.
    """
    return _decode(body, _chat_decoder, ChatRequest)


def decode_completion_request(body: bytes) -> CompletionRequest:
    """As ``decode_chat_request``, for /v1/completions."""
    return _decode(body, _completion_decoder, CompletionRequest)


def _decode(body: bytes, decoder: msgspec.json.Decoder[_Request], kind: type[_Request]) -> _Request:
    try:
        fields = _raw_decoder.decode(body)
        refused = (_REFUSED.keys() - set(kind.__struct_fields__)) | set(_ALSO_REFUSED[kind])
        for name in fields.keys() & refused:
            value = msgspec.json.decode(fields[name])
            if not any(value == nothing for nothing in _REFUSED.get(name, _NOTHING)):
                raise InvalidRequest(f"{name} is not supported", param=name)
        request = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _named(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deep") from error
    _check_together(request)
    return request


def _named(error: msgspec.ValidationError) -> InvalidRequest:
    """Turn "Expected `int`, got `str` - at `$.seed`" into an error with ``param`` seed."""
    text = str(error)
    match = _AT_PATH.search(text)
    missing = re.search(r"missing required field `(\w+)`", text)
    path = match["path"].lstrip(".") if match else ""
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
    reason = text[: match.start()] if match else text
    return InvalidRequest(f"{path}: {reason}" if path else reason, param=path or None)


def _check_together(request: GenerationFields) -> None:
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequest("best_of is not supported unless it equals n", param="best_of")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream", param="stream_options")
    if isinstance(request, ChatRequest):
        check_tools(request.tools, request.tool_choice)
        _check_messages(request.messages)
        if request.top_logprobs is not None and not request.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs", param="top_logprobs")
        if request.continue_final_message:
            if request.add_generation_prompt:
                raise InvalidRequest(
                    "continue_final_message and add_generation_prompt exclude each other",
                    param="continue_final_message",
                )
            if not request.messages[-1].text.strip():
                raise InvalidRequest("the final message is empty", param="continue_final_message")
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        raise InvalidRequest("echo with logprobs is not supported", param="logprobs")


def _check_messages(messages: list[ChatMessage]) -> None:
    for index, message in enumerate(messages):
        if message.tool_calls and message.role != "assistant":
            param = f"messages[{index}].tool_calls"
            raise InvalidRequest(f"{param}: only an assistant calls tools", param=param)
        if (message.tool_call_id is None) == (message.role == "tool"):
            param = f"messages[{index}].tool_call_id"
            raise InvalidRequest(f"{param}: needed by role tool, and by no other", param=param)
