"""The OpenAPI document of the gateway, generated from the types that decode the requests."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from gateway import answer_schema
from gateway.anthropic import answer as messages_answer
from gateway.anthropic.schema import CountTokensRequest, MessagesRequest
from gateway.openai import answer as openai_answer
from gateway.openai.tokenize_schema import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeChatRequest,
    TokenizePromptRequest,
)
from gateway.request.decoding import refused_fields
from gateway.request.schema import ChatRequest, CompletionRequest
from gateway.responses import answer as responses_answer
from gateway.responses.schema import ResponsesRequest

_REF = "#/components/schemas/{name}"
_JSON = "application/json"
_STREAM = "text/event-stream"


class Operation(NamedTuple):
    """One method of one path."""

    method: str
    path: str
    summary: str
    answer: type | None
    """None: plain text."""
    bodies: tuple[type[msgspec.Struct], ...] = ()
    chunks: tuple[type, ...] = ()
    """Events of the answer's streamed form."""
    errors: tuple[int, ...] = ()
    error: type = answer_schema.Error
    ends_with: str = "[DONE]"
    """The data of a stream's last event, where that is no JSON."""


_BODY_ERRORS = (400, 404, 408, 413, 429, 500, 503)
OPERATIONS = (
    Operation(
        "post", "/v1/chat/completions", "Answer the next turn of a conversation",
        openai_answer.ChatAnswer, (ChatRequest,), (openai_answer.ChatChunk, answer_schema.Error),
        (*_BODY_ERRORS, 504),
    ),
    Operation(
        "post", "/v1/completions", "Continue one or more prompts",
        openai_answer.CompletionAnswer, (CompletionRequest,),
        (openai_answer.CompletionChunk, answer_schema.Error), (*_BODY_ERRORS, 504),
    ),
    Operation(
        "post", "/v1/responses", "Answer the next turn of a conversation that the client keeps",
        responses_answer.Response, (ResponsesRequest,), responses_answer.EVENTS,
        (*_BODY_ERRORS, 504), ends_with="",
    ),
    Operation(
        "post", "/v1/messages", "Answer the next turn of a conversation, as Anthropic's API",
        messages_answer.Message, (MessagesRequest,), messages_answer.EVENTS,
        (*_BODY_ERRORS, 504), messages_answer.MessageError, "",
    ),
    Operation(
        "post", "/v1/messages/count_tokens", "Count the tokens of a conversation's prompt",
        messages_answer.TokenCount, (CountTokensRequest,), errors=_BODY_ERRORS,
        error=messages_answer.MessageError,
    ),
    Operation("get", "/v1/models", "List the served models", answer_schema.ModelList),
    Operation("get", "/v1/models/{id}", "Describe a model", answer_schema.Model, errors=(404,)),
    Operation(
        "post", "/tokenize", "Token ids of a text or a conversation",
        TokenizeAnswer, (TokenizePromptRequest, TokenizeChatRequest), errors=_BODY_ERRORS,
    ),
    Operation(
        "post", "/detokenize", "Text of token ids",
        DetokenizeAnswer, (DetokenizeRequest,), errors=_BODY_ERRORS,
    ),
    Operation("get", "/health", "Whether the process is alive", answer_schema.Status),
    Operation(
        "get", "/ready", "Whether a request could be served now",
        answer_schema.Status, errors=(503,),
    ),
    Operation("get", "/metrics", "Metrics for Prometheus", None),
    Operation("get", "/debug/census", "Live figures of every worker", answer_schema.Census),
    Operation("get", "/debug/dashboard", "What the dashboard shows", answer_schema.Dashboard),
)  # fmt: skip

_REASONS = {
    400: "The request is wrong; `param` names the field.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "No capacity at the moment.",
    500: "A fault of the server.",
    503: "No workers.",
    504: "The request's deadline passed.",
}


@functools.cache
def build_document(model: str) -> dict[str, Any]:
    """The whole document; reads source files, and takes 0.1 s the first time.

    Args:
        model: Name of the served model: the only one that a request may name.
    """
    types: list[Any] = [answer_schema.Error]
    for operation in OPERATIONS:
        types += [] if operation.answer is None else [operation.answer]
        types += (*operation.chunks, *operation.bodies, operation.error)
    _, components = msgspec.json.schema_components(types, ref_template=_REF)
    for kind in {*types, *_nested(types)}:
        if kind.__name__ in components:
            _describe_fields(components[kind.__name__], kind)
    for operation in OPERATIONS:
        for body in operation.bodies:
            _close(components[body.__name__], body, model)
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.2.0",
        "info": {
            "title": "pdmesh",
            "version": "1",
            "description": f"OpenAI- and Anthropic-compatible API, serving {model}.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }


def _ref(kind: type) -> dict[str, Any]:
    return {"$ref": _REF.format(name=kind.__name__)}


def _operation(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if operation.answer is not None:
        content = {_JSON: {"schema": _ref(operation.answer)}}
    if operation.chunks:
        content[_STREAM] = {"itemSchema": _event(operation)}
    responses = {"200": {"description": "Success.", "content": content}}
    for status in operation.errors:
        responses[str(status)] = {
            "description": _REASONS[status],
            "content": {_JSON: {"schema": _ref(operation.error)}},
        }
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.bodies:
        refs = [_ref(body) for body in operation.bodies]
        schema = refs[0] if len(refs) == 1 else {"oneOf": refs}
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    if "{id}" in operation.path:
        described["parameters"] = [
            {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return described


def _event(operation: Operation) -> dict[str, Any]:
    """A server-sent event: JSON, or the end."""
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": _JSON,
        "contentSchema": {"anyOf": [_ref(chunk) for chunk in operation.chunks]},
    }
    if operation.ends_with:
        data = {"anyOf": [data, {"const": operation.ends_with}]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _close(schema: dict[str, Any], body: type[msgspec.Struct], model: str) -> None:
    """Say of a request what its decoder adds to the type: unknown and refused fields, the model."""
    properties = schema["properties"]
    for name, values in refused_fields(body).items():
        if name not in properties:
            properties[name] = {"enum": list(values), "description": "Not served."}
    properties["model"] = {
        "enum": [model, None],
        "default": None,
        "description": "The served model; may be left out.",
    }
    schema["additionalProperties"] = False


def _nested(types: Sequence[Any]) -> set[Any]:
    """Every struct that the fields of ``types`` refer to."""
    found: set[Any] = set()
    waiting: list[Any] = list(msgspec.inspect.multi_type_info(types))
    while waiting:
        info = waiting.pop()
        if isinstance(info, msgspec.inspect.StructType):
            if info.cls in found:
                continue
            found.add(info.cls)
            waiting += [field.type for field in info.fields]
            continue
        waiting += [
            part
            for name in ("type", "item_type", "key_type", "value_type")
            if isinstance(part := getattr(info, name, None), msgspec.inspect.Type)
        ]
        waiting += getattr(info, "types", ())
    return found


def _describe_fields(schema: dict[str, Any], kind: type) -> None:
    for name, text in field_docs(kind).items():
        if name in schema["properties"]:
            described = copy.copy(schema["properties"][name])
            described["description"] = text
            schema["properties"][name] = described


def field_docs(kind: type) -> dict[str, str]:
    """The docstrings under the fields of a class and its bases."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not issubclass(base, msgspec.Struct) or base is msgspec.Struct:
            continue
        [defined] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(defined, ast.ClassDef)
        for field, text in zip(defined.body, defined.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                docs[field.target.id] = inspect.cleandoc(text.value.value)
    return docs
