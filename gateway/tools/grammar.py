"""Grammars of answers that call tools, in the model's own format.

required, named   start: calls
auto, strict      start: free text in which calls follow their schemas
auto, JSON        start: the JSON of response_format, or calls
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.request.tool_fields import FunctionDefinition
from gateway.structured.output_form import json_rule, literal
from gateway.tools.format import ToolFormat

_MAX_CALLS = 32
"""In one answer that must call tools."""


class ToolGrammar:
    """Builds the grammars of one set of functions."""

    def __init__(
        self,
        tool_format: ToolFormat,
        functions: Sequence[FunctionDefinition],
        *,
        trigger_id: int | None,
        parallel: bool,
    ) -> None:
        """Prepare.

        Args:
            tool_format: how calls are written.
            functions: at least one.
            trigger_id: the trigger's token, where it is a special one that no text matches.
            parallel: whether more than one call may be made.
        """
        self._format = tool_format
        self._functions = functions
        self._trigger_id = trigger_id
        self._parallel = parallel

    def calls_only(self) -> str:
        """The answer is one or more calls."""
        return "\n".join(["start: calls", *self._call_rules()])

    def calls_or(self, rule: str) -> str:
        """The answer is calls, or what ``rule`` (a right side) says."""
        return "\n".join(["start: calls | answer", f"answer: {rule}", *self._call_rules()])

    def text_with_calls(self) -> str:
        """Free text; wherever calls begin, they are whole ones."""
        form = self._format
        if form.is_whole_answer:
            return self.calls_or(r"/([^{\s](.|\n)*)?/")
        rules = ["start: tagged* TEXT", "TEXT: /(.|\\n)*/"]
        # The trigger comes first in what precedes the first call of a group.
        before = (form.opening or form.call_opening).removeprefix(form.trigger)
        if self._trigger_id is None:
            rules.append(f"head[lazy]: TEXT {literal(form.trigger)}")
            begun = "head"
        else:
            begun = f"TEXT <[{self._trigger_id}]>"
        if form.opening:
            more = f" ({literal(form.separator)} call)*" if self._parallel else ""
            rules.append(f"tagged: {begun} {literal(before)} call{more} {literal(form.closing)}")
        else:
            rules.append(f"tagged: {begun} {literal(before)} body {literal(form.call_closing)}")
        return "\n".join([*rules, *self._call_rules()])

    def _call_rules(self) -> list[str]:
        form = self._format
        more = f" ({literal(form.separator)} call){{0,{_MAX_CALLS - 1}}}" if self._parallel else ""
        opening, closing = self._text(form.opening), self._text(form.closing)
        before, after = self._text(form.call_opening), self._text(form.call_closing)
        bodies = " | ".join(f"body_{index}" for index in range(len(self._functions)))
        return [
            f"calls: {opening} call{more} {closing}",
            f"call: {before} body {after}",
            f"body: {bodies}",
            *(self._body(index, function) for index, function in enumerate(self._functions)),
        ]

    def _body(self, index: int, function: FunctionDefinition) -> str:
        head, brace = literal(self._format.head(function.name)), literal("}")
        # The arguments are an object whatever the schema says of their type.
        schema = {"type": "object", **(function.parameters or {})}
        rule = json_rule(schema, lenient=not function.strict)
        return f"body_{index}: {head} arguments_{index} {brace}\narguments_{index}: {rule}"

    def _text(self, text: str) -> str:
        """``text`` as terms of a rule, with the trigger as its token."""
        if not text:
            return ""
        trigger = self._format.trigger
        if self._trigger_id is None or not text.startswith(trigger):
            return literal(text)
        rest = text.removeprefix(trigger)
        return f"<[{self._trigger_id}]> " + (literal(rest) if rest else "")
