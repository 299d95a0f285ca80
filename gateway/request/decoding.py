"""Decodes request bodies, with errors that name the field.

No field is ignored in silence: what is not served is refused by name, unless its value asks for
nothing (``null``, ``[]``, …), and so is any name that the API does not have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from gateway.errors import UnknownParameter, UnsupportedParameter
from gateway.request.checks import check_together
from gateway.request.schema import ChatRequest, CompletionRequest, GenerationFields
from mesh.errors import InvalidRequest

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
