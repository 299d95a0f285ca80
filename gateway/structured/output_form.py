"""What a request wants its output to follow, as a grammar for ``mesh.model_text.grammar``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from gateway.request.schema import GenerationFields
from gateway.request.structured_fields import check_depth
from mesh.errors import InvalidRequest

_JSON_WHITESPACE = "( |\\n {0,16})?"
"""Between JSON tokens: nothing, a space, or a new line with its indentation. Small models that may
write any white space write nothing else."""


class OutputForm(NamedTuple):
    """One form that the whole output takes."""

    param: str
    """The field that asks for it, for errors."""
    grammar: str
    """Lark text with a rule ``start``."""
    json_rule: str = ""
    """For JSON: the right side of a rule, to be used in a larger grammar."""


def output_form(request: GenerationFields) -> OutputForm | None:
    """The one form that the request's fields ask for; None is free text.

    Raises:
        InvalidRequest: more than one, or one that is not complete.
    """
    wanted = [*_response_format(request), *_structured_outputs(request), *_guided(request)]
    if len(wanted) > 1:
        names = ", ".join(sorted(each.param for each in wanted))
        raise InvalidRequest(
            f"the output can follow one of these, not all: {names}", param=wanted[1].param
        )
    return wanted[0] if wanted else None


def json_rule(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """The right side of a Lark rule for JSON of this schema.

    Args:
        schema: a JSON schema.
        lenient: keywords that cannot be enforced are skipped instead of refused.
    """
    options = {"whitespace_pattern": _JSON_WHITESPACE, "lenient": lenient}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def literal(text: str) -> str:
    """``text`` as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def _json(param: str, schema: Mapping[str, Any] | str) -> OutputForm:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{param}: not JSON: {error}", param=param) from error
        if not isinstance(schema, dict):
            raise InvalidRequest(f"{param}: the schema is not an object", param=param)
    check_depth(schema, param)
    rule = json_rule(schema)
    return OutputForm(param, f"start: {rule}", rule)


def _regex(param: str, regex: str) -> OutputForm:
    return OutputForm(param, llguidance.LLMatcher.grammar_from_regex(regex))


def _choice(param: str, choices: list[str]) -> OutputForm:
    return OutputForm(param, "start: " + " | ".join(literal(choice) for choice in choices))


def _grammar(param: str, grammar: str) -> OutputForm:
    try:
        return OutputForm(param, any_to_lark(grammar))
    except Exception as error:  # the converter has its own kinds
        reason = str(error).split("\n", 1)[0][:200]
        raise InvalidRequest(f"{param}: {reason}", param=param) from error


def _response_format(request: GenerationFields) -> list[OutputForm]:
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [_json("response_format", {"type": "object"})]
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        param = "response_format.json_schema"
        raise InvalidRequest(f"{param}: missing, or without a schema", param=param)
    return [_json("response_format.json_schema.schema", wanted.json_schema.schema)]


def _structured_outputs(request: GenerationFields) -> list[OutputForm]:
    fields = request.structured_outputs
    if fields is None:
        return []
    name = "structured_outputs"
    wanted = []
    if fields.json is not None:
        wanted.append(_json(f"{name}.json", fields.json))
    if fields.json_object:
        wanted.append(_json(f"{name}.json_object", {"type": "object"}))
    if fields.regex is not None:
        wanted.append(_regex(f"{name}.regex", fields.regex))
    if fields.choice is not None:
        wanted.append(_choice(f"{name}.choice", fields.choice))
    if fields.grammar is not None:
        wanted.append(_grammar(f"{name}.grammar", fields.grammar))
    if not wanted:
        raise InvalidRequest(f"{name}: none of its fields is given", param=name)
    return wanted


def _guided(request: GenerationFields) -> list[OutputForm]:
    wanted = []
    if request.guided_json is not None:
        wanted.append(_json("guided_json", request.guided_json))
    if request.guided_regex is not None:
        wanted.append(_regex("guided_regex", request.guided_regex))
    if request.guided_choice is not None:
        wanted.append(_choice("guided_choice", request.guided_choice))
    if request.guided_grammar is not None:
        wanted.append(_grammar("guided_grammar", request.guided_grammar))
    return wanted
