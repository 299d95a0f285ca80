"""A Jinja sandbox in which a template can spend only so much time and text.

Jinja's own sandbox keeps a template away from Python; it does not keep it from looping for hours or
from doubling a string forty times. Here whatever can repeat or grow is counted against the budget
of one rendering: turns of loops and macros, and the characters of every string made by an operator,
a filter, a call, a slice or a captured block. What could grow by a factor in one step (``*``,
``replace``, ``join``, widths of formats) is measured before it is done, or not offered.

    source ── parse ──▶ AST ── _Meter: adds ``spend(…)`` to loops, macros, blocks ──▶ code
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
from jinja2.visitor import NodeTransformer

MAX_SPENT_CHARS = 64 << 20
"""Characters that one rendering may make, drafts included."""
MAX_TEXT_CHARS = 8 << 20
"""Largest single string, and the longest list."""

_STEP_CHARS = 16
"""A turn of a loop costs as much as so many characters."""
_ITEM_CHARS = 64
"""Anything in a container counts as so many, which bounds the time of counting."""
_MAX_INT_BITS = 256
_MAX_WIDTH = 1000
_LONG_NUMBER = re.compile(r"\d{4,}|\*")
_NO_METHODS = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "translate", "to_bytes"}
)
_NO_FILTERS = ("center", "wordwrap", "xmlattr", "urlize", "pprint", "random", "filesizeformat")
_TEXT_FILTERS = frozenset(
    {
        *("capitalize", "e", "escape", "forceescape", "format", "indent", "join", "lower"),
        *("replace", "safe", "string", "striptags", "title", "tojson", "trim", "truncate"),
        *("upper", "urlencode", "wordcount"),
    }
)
"""Filters that turn whatever they get into a string."""


class BudgetExceeded(jinja2.TemplateError):
    """The template took too much text."""


class TimeExceeded(jinja2.TemplateError):
    """The template took too long."""


class Budget:
    """What is left to one rendering."""

    __slots__ = ("_deadline_s", "_left")

    def __init__(self, time_s: float) -> None:
        self._deadline_s = time.monotonic() + time_s
        self._left = MAX_SPENT_CHARS

    def spend(self, num_chars: int) -> None:
        """Take ``num_chars``.

        Raises:
            BudgetExceeded, TimeExceeded: nothing is left.
        """
        self._left -= num_chars + _STEP_CHARS
        if self._left < 0:
            raise BudgetExceeded("the template makes too much text")
        if time.monotonic() > self._deadline_s:
            raise TimeExceeded("the template takes too long")


BUDGET: ContextVar[Budget | None] = ContextVar("template_budget", default=None)


def spend(num_chars: int) -> str:
    """Called by compiled templates."""
    budget = BUDGET.get()
    if budget is not None:  # None while constants are folded
        budget.spend(num_chars)
    return ""


def spent(value: Any) -> Any:
    """Charge for a value that was just made, and return it."""
    size = len(value) if isinstance(value, str | list | tuple | dict) else 0
    if size > MAX_TEXT_CHARS:
        raise BudgetExceeded("the template makes too much text")
    spend(size)
    return value


def concat(*values: Any) -> str:
    """The ``~`` operator."""
    for value in values:
        check_text(value)
    return "".join(map(str, values))


def slice_of(value: Any, start: Any, stop: Any, step: Any) -> Any:
    """``value[start:stop:step]``."""
    return value[start:stop:step]


def check_text(value: Any) -> None:
    """Refuse to turn a container into a string that is far larger than itself."""
    if isinstance(value, str):
        return
    waiting, size = [value], 0
    while waiting:
        one = waiting.pop()
        size += len(one) + 2 if isinstance(one, str) else _ITEM_CHARS
        if size > MAX_TEXT_CHARS:
            raise BudgetExceeded("the template makes too much text")
        if isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += one


def _refuse_over(num_chars: int) -> None:
    if num_chars > MAX_TEXT_CHARS:
        raise BudgetExceeded("the template makes too much text")


def _check_replace(text: str, old: str, new: str) -> None:
    _refuse_over(len(text) + text.count(old) * len(new))


def _check_join(separator: str, items: list[Any]) -> None:
    check_text(items)
    _refuse_over(len(separator) * len(items))


class _Meter(NodeTransformer):
    """Makes the template pay for what it repeats or captures."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        """A turn of a loop."""
        return self._body(node)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Node:
        """A call of a macro."""
        return self._body(node)

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> jinja2.nodes.Node:
        """A call of the block by the macro that it is given to."""
        return self._body(node)

    def visit_AssignBlock(self, node: jinja2.nodes.AssignBlock) -> jinja2.nodes.Node:
        """Captured text."""
        self.generic_visit(node)
        node.filter = jinja2.nodes.Filter(node.filter, "spent", [], [], None, None)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        """The ``~`` operator."""
        self.generic_visit(node)
        return _call("concat", node.nodes, node.lineno)

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        """A slice; single items cost nothing."""
        self.generic_visit(node)
        cut = node.arg
        if not isinstance(cut, jinja2.nodes.Slice):
            return node
        none = jinja2.nodes.Const(None)
        arguments = [node.node, cut.start or none, cut.stop or none, cut.step or none]
        return _call("slice_of", arguments, node.lineno)

    def _body(self, node: Any) -> jinja2.nodes.Node:
        size = sum(len(data.data) for data in node.find_all(jinja2.nodes.TemplateData))
        self.generic_visit(node)
        call = _call("spend", [jinja2.nodes.Const(size)], node.lineno)
        node.body.insert(0, jinja2.nodes.ExprStmt(call, lineno=node.lineno))
        return node  # type: ignore[no-any-return]


def _call(name: str, arguments: list[Any], lineno: int) -> jinja2.nodes.Call:
    function = jinja2.nodes.ImportedName(f"gateway.prompts.template_limits.{name}", lineno=lineno)
    return jinja2.nodes.Call(function, arguments, [], None, None, lineno=lineno)


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment that templates are compiled in; a ``Budget`` must be set to render."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_output, **options)
        for name in _NO_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        for name, filter_ in list(self.filters.items()):
            self.add_filter(name, filter_)
        self.filters["spent"] = spent

    def add_filter(self, name: str, filter_: Callable[..., Any]) -> None:
        """Offer a filter, metered."""
        self.filters[name] = _metered(name, filter_)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template = super()._parse(source, name, filename)
        metered: jinja2.nodes.Template = _Meter().visit(template)
        return metered.set_environment(self).set_lineno(1)  # type: ignore[return-value]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Leave out methods that pad to any width."""
        return attr not in _NO_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` without large widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        if value.__name__ == "format_map":
            raise jinja2.exceptions.SecurityError("format_map is not offered")
        pattern: str = value.__self__
        function = wrapped

        def limited(*args: Any, **kwargs: Any) -> str:
            _check_format(pattern, (*args, *kwargs.values()))
            return function(*args, **kwargs)

        return limited

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Measure first, then do it."""
        if operator == "*":
            for text, count in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and isinstance(count, int):
                    _refuse_over(len(text) * count)
        if operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            bits = bits * right if operator == "**" else bits + right.bit_length()
            if bits > _MAX_INT_BITS:
                raise BudgetExceeded("the template makes too large a number")
        return spent(super().call_binop(context, operator, left, right))

    def call(
        __self,
        __context: jinja2.runtime.Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Measure first where a call can grow its input, then do it."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            method = __obj.__name__
            if method == "replace" and len(args) >= 2:
                _check_replace(owner, args[0], args[1])
            elif method == "join" and args:
                items = list(args[0])
                _check_join(owner, items)
                args = (items,)
        return spent(super().call(__context, __obj, *args, **kwargs))


def _output(value: Any) -> Any:
    """Every ``{{ … }}``."""
    check_text(value)
    return spent(value)


def _check_format(pattern: str, values: tuple[Any, ...]) -> None:
    if _LONG_NUMBER.search(pattern) or any(
        isinstance(value, int) and not -(10**18) < value < 10**18 for value in values
    ):
        raise BudgetExceeded("the template formats with too large a width")
    if "{" in pattern and any(
        isinstance(value, int) and value > _MAX_WIDTH and re.search(r":[^}]*{", pattern)
        for value in values
    ):
        raise BudgetExceeded("the template formats with too large a width")
    for value in values:
        check_text(value)


def _metered(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    takes_context = hasattr(filter_, "jinja_pass_arg")

    @functools.wraps(filter_)
    def metered(*args: Any, **kwargs: Any) -> Any:
        if name == "join" and len(args) > 1 and not isinstance(args[1], str):
            args = (args[0], list(args[1]), *args[2:])  # it takes the evaluation context first
        given = args[1:] if takes_context else args
        if name in _TEXT_FILTERS and given:
            check_text(given[0])
        _check_filter(name, given, kwargs)
        return spent(filter_(*args, **kwargs))

    return metered


def _check_filter(name: str, given: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if name == "replace" and len(given) >= 3:
        _check_replace(str(given[0]), str(given[1]), str(given[2]))
    elif name == "join":
        separator = given[1] if len(given) > 1 else kwargs.get("d", "")
        _refuse_over(len(str(separator)) * len(given[0]))
    elif name == "format":
        _check_format(str(given[0]), (*given[1:], *kwargs.values()))
    elif name == "sum":
        start = given[2] if len(given) > 2 else kwargs.get("start", 0)
        if not isinstance(start, int | float):
            raise BudgetExceeded("the template may only sum numbers")
    elif name in ("indent", "tojson"):
        width = given[1] if name == "indent" and len(given) > 1 else kwargs.get("width", 0)
        width = kwargs.get("indent", width)
        size = width if isinstance(width, int) else len(str(width or ""))
        if size > 16:
            raise BudgetExceeded("the template indents too far")
    elif name in ("batch", "slice", "round") and any(
        isinstance(value, int) and value > _MAX_WIDTH for value in given[1:2]
    ):
        raise BudgetExceeded("the template splits into too many parts")
