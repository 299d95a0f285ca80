"""Request fields that say what the output must follow; ``structured_output`` makes it a grammar."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mesh.errors import InvalidRequest

ChoiceList = Annotated[
    list[Annotated[str, Meta(max_length=4096)]], Meta(min_length=1, max_length=1024)
]
GrammarText = Annotated[str, Meta(min_length=1, max_length=64 << 10)]
JsonSchema = dict[str, Any] | GrammarText
"""A schema, or its JSON text."""


_MAX_DEPTH = 100


def check_depth(value: Any, param: str) -> None:
    """Refuse JSON that is nested deeper than what handles it later can follow.

    Raises:
        InvalidRequest: over the limit; names ``param``.
    """
    level, depth = [value], 0
    while level:
        if depth > _MAX_DEPTH:
            raise InvalidRequest(f"{param}: nested over {_MAX_DEPTH} deep", param=param)
        level = [inner for outer in level for inner in _items(outer)]
        depth += 1


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``response_format.json_schema``."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    """The schema is enforced either way."""


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's way; exactly one of them is given."""

    json: JsonSchema | None = None
    json_object: bool | None = None
    regex: GrammarText | None = None
    choice: ChoiceList | None = None
    grammar: GrammarText | None = None
