"""What the text of one request's answers must follow, and how tool calls are found in it."""

from __future__ import annotations

from typing import NamedTuple

from gateway.prompts.served_model import ServedModel
from gateway.request.schema import ChatRequest, GenerationFields
from gateway.request.tool_fields import NamedToolChoice, Tool
from gateway.structured.output_form import OutputForm, output_form
from gateway.tools.format import ToolFormat
from gateway.tools.grammar import ToolGrammar
from gateway.tools.parser import ToolCallParser
from mesh.errors import InvalidRequest


class ToolUse(NamedTuple):
    """How the calls of one answer are parsed."""

    format: ToolFormat
    names: tuple[str, ...]
    guaranteed: bool
    """A grammar keeps calls whole."""
    max_calls: int | None

    def parser(self) -> ToolCallParser:
        """A parser for one answer."""
        return ToolCallParser(
            self.format, self.names, guaranteed=self.guaranteed, max_calls=self.max_calls
        )


class OutputRules(NamedTuple):
    """Nothing but defaults is free text."""

    grammar: str = ""
    param: str = ""
    """The field to blame for ``grammar``."""
    tools: ToolUse | None = None


def output_rules(request: GenerationFields, model: ServedModel) -> OutputRules:
    """Turn the request's fields into rules; the grammar is not compiled yet.

    Raises:
        InvalidRequest: fields that contradict each other.
    """
    wanted = output_form(request)
    tools = request.callable_tools if isinstance(request, ChatRequest) else []
    rules = _rules(request, model, tools, wanted) if tools else _free(wanted)
    if rules.grammar and request.ignore_eos:
        raise InvalidRequest(
            f"ignore_eos: {rules.param} says where the output ends", param="ignore_eos"
        )
    for name in ("allowed_token_ids", "bad_words"):
        if rules.grammar and getattr(request, name):
            raise InvalidRequest(f"{name}: not together with {rules.param}", param=name)
    return rules


def _free(wanted: OutputForm | None) -> OutputRules:
    return OutputRules() if wanted is None else OutputRules(wanted.grammar, wanted.param)


def _rules(
    request: GenerationFields, model: ServedModel, tools: list[Tool], wanted: OutputForm | None
) -> OutputRules:
    assert isinstance(request, ChatRequest)
    tool_format, choice = model.tool_format, request.tool_choice
    parallel = request.parallel_tool_calls is not False
    names = tuple(tool.function.name for tool in tools)
    if isinstance(choice, NamedToolChoice):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    grammar = ToolGrammar(
        tool_format,
        [tool.function for tool in tools],
        trigger_id=model.tokenizer.special_ids.get(tool_format.trigger),
        parallel=parallel,
    )
    if choice is not None and choice != "auto":
        text = grammar.calls_only()
    elif wanted is not None:
        if not wanted.json_rule:
            raise InvalidRequest(
                f'{wanted.param}: not together with tools, unless tool_choice is "none"',
                param=wanted.param,
            )
        text = grammar.calls_or(wanted.json_rule)
    elif any(tool.function.strict for tool in tools):
        text = grammar.text_with_calls()
    else:
        text = ""
    use = ToolUse(tool_format, names, bool(text), None if parallel else 1)
    param = wanted.param if wanted is not None and "answer:" in text else "tools"
    return OutputRules(text, param if text else "", use)
