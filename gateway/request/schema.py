"""The OpenAI request bodies, typed, and decoded with errors that name the field.

Fields follow the OpenAI API plus vLLM's sampling extensions. No field is ignored in silence: what
is not served is refused by name, unless its value asks for nothing (``null``, ``[]``, …), and so is
any name that neither API has. Only what cannot change an answer (``user``, ``metadata``, cache
hints) is taken without effect; those fields say so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from gateway.errors import UnknownParameter, UnsupportedParameter
from gateway.request.structured_fields import (
    ChoiceList,
    GrammarText,
    JsonSchema,
    ResponseFormat,
    StructuredOutputs,
)
from gateway.request.tool_fields import ToolCallList, ToolChoice, ToolList, check_tools
from mesh.errors import InvalidRequest
from mesh.messages import SloClass

MAX_STOP_STRINGS = 4
_MAX_SEED = (1 << 63) - 1

StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
StopList = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
ServiceTier = Literal[
    "auto", "default", "priority", "scale", "fast", "interactive", "flex", "batch"
]
"""OpenAI's tiers, and the two classes by their own names."""
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
BadWord = Annotated[str, Meta(min_length=1, max_length=64)]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream carries besides tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Only false: chunks are never padded."""


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
    """Make this many answers and return the ``n`` of the highest mean log-probability a token."""
    stop: StopString | StopList | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=64)] | None = None
    """Matched as tokens: as tokenised alone, and after a space."""
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=1024)] | None = None
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
    return_tokens_as_token_ids: bool | None = None
    """Tokens in logprobs are written ``token_id:17``."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    """Keep only the last tokens of the prompt; -1: as many as fit."""
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] = 0
    service_tier: ServiceTier | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    user: str | None = None
    """No effect, as the next ones: nothing is stored, and every prefix is cached for all."""
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = None
    parallel_tool_calls: bool | None = None
    """No effect without tools."""

    @property
    def num_samples(self) -> int:
        """Answers to make for each prompt."""
        return self.best_of or self.n or 1

    @property
    def slo_class(self) -> SloClass:
        """Whether latency or throughput counts; ``flex`` and ``batch`` name the latter."""
        return "batch" if self.service_tier in ("flex", "batch") else "interactive"


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn; fields of earlier answers that clients send back are accepted empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: ToolCallList | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    parsed: Any = None
    """Left by the ``openai`` package; not read."""

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
    echo: bool | None = None
    add_special_tokens: bool = True


_Body = TypeVar("_Body", bound=msgspec.Struct)

_NOTHING: tuple[Any, ...] = (None, [], {}, "", False)
_REFUSED: dict[str, tuple[Any, ...]] = {
    name: _NOTHING
    for name in (
        *("tools", "functions", "suffix", "audio", "prediction", "web_search_options"),
        *("moderation", "prompt_cache_options", "store"),
        *("chat_template", "documents", "mm_processor_kwargs", "media_io_kwargs"),
        *("prompt_logprobs", "prompt_embeds", "use_beam_search", "truncation_side"),
        *("structural_tag", "logits_processors"),
        *("lora", "thinking_token_budget", "repetition_detection", "request_id"),
        *("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "mm_data"),
    )
}
_REFUSED |= {
    "tool_choice": (None, "none", "auto"),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "reasoning_effort": (None, "none"),
    "include_reasoning": (None, True),
    "verbosity": (None, "medium"),
    "length_penalty": (None, 1),
    "spaces_between_special_tokens": (None, True),
}
"""Field → values that ask for nothing. Other bodies name theirs in ``not_served``."""

_ALSO_REFUSED: dict[type, tuple[str, ...]] = {
    ChatRequest: ("prompt", "echo", "suffix"),
    CompletionRequest: ("messages", "top_logprobs", "max_completion_tokens"),
}

_OWN_VARIABLES = {"messages", "add_generation_prompt", "continue_final_message"}
_AT_PATH = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)


def decode_chat_request(body: bytes) -> ChatRequest:
    """Decode and validate; the error's ``param`` is the path of the field, ``messages[0].role``.

    Raises:
        InvalidRequest: not JSON, a wrong type or value, or a field that is not served.
    """
    request = decode_body(body, _chat_decoder, ChatRequest)
    check_together(request)
    return request


def decode_completion_request(body: bytes) -> CompletionRequest:
    """As ``decode_chat_request``, for /v1/completions."""
    request = decode_body(body, _completion_decoder, CompletionRequest)
    check_together(request)
    return request


def refused_fields(kind: type) -> Mapping[str, tuple[Any, ...]]:
    """Fields of a body of this ``kind`` that are not served → the values that are let pass."""
    if not issubclass(kind, GenerationFields):
        names = getattr(kind, "not_served", ())
        return {name: _REFUSED.get(name, _NOTHING) for name in names}
    refused = _REFUSED | dict.fromkeys(_ALSO_REFUSED.get(kind, ()), _NOTHING)
    return {name: refused[name] for name in refused.keys() - set(kind.__struct_fields__)}


def decode_body(body: bytes, decoder: msgspec.json.Decoder[_Body], kind: type[_Body]) -> _Body:
    """Decode one JSON object into ``kind``.

    Raises:
        InvalidRequest: not JSON, a wrong type or value, an unknown field, or one not served.
    """
    try:
        fields = _raw_decoder.decode(body)
        refused = refused_fields(kind)
        for name in fields.keys() - set(kind.__struct_fields__):
            if name not in refused:
                raise UnknownParameter(f"{name[:80]} is not a known field", param=name[:80])
            value = msgspec.json.decode(fields[name])
            if not any(_is(value, nothing) for nothing in refused[name]):
                raise UnsupportedParameter(f"{name} is not supported", param=name)
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _named(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deep") from error


def _is(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _named(error: msgspec.ValidationError) -> InvalidRequest:
    """Turn "Expected `int`, got `str` - at `$.seed`" into an error with ``param`` seed."""
    text = str(error)
    match = _AT_PATH.search(text)
    missing = re.search(r"(?:missing required|contains unknown) field `([^`]*)`", text)
    path = match["path"].lstrip(".") if match else ""
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
    reason = text[: match.start()] if match else text
    kind = UnknownParameter if "contains unknown field" in reason else InvalidRequest
    return kind(f"{path}: {reason}" if path else reason, param=path or None)


def check_together(request: GenerationFields) -> None:
    """Check what one field says about another.

    Raises:
        InvalidRequest: they contradict each other.
    """
    if request.best_of is not None:
        if request.best_of < (request.n or 1):
            raise InvalidRequest("best_of is less than n", param="best_of")
        if request.stream and request.best_of > (request.n or 1):
            raise InvalidRequest("best_of over n cannot be streamed", param="best_of")
    if request.stream_options is not None:
        if not request.stream:
            raise InvalidRequest("stream_options needs stream", param="stream_options")
        if request.stream_options.include_obfuscation:
            param = "stream_options.include_obfuscation"
            raise UnsupportedParameter(f"{param} is not supported", param=param)
    if request.truncate_prompt_tokens == 0:
        raise InvalidRequest("truncate_prompt_tokens is 0", param="truncate_prompt_tokens")
    if isinstance(request, ChatRequest):
        check_tools(request.tools, request.tool_choice)
        _check_messages(request.messages)
        if request.top_logprobs is not None and not request.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs", param="top_logprobs")
        for name in _OWN_VARIABLES & (request.chat_template_kwargs or {}).keys():
            raise InvalidRequest(
                f"{name} is a field of its own", param=f"chat_template_kwargs.{name}"
            )
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
