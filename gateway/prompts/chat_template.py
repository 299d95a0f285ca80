"""Renders a model's Jinja chat template the way transformers does, in a sandbox.

The environment follows transformers `utils/chat_template_utils.py` (_compile_jinja_template), with
limits on what a template may spend (``gateway.prompts.template_limits``).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from gateway.prompts.template_limits import (
    BUDGET,
    MAX_TEXT_CHARS,
    Budget,
    BudgetExceeded,
    LimitedEnvironment,
    TimeExceeded,
)
from mesh.errors import ConfigError, InvalidRequest

MAX_SOURCE_CHARS = 1 << 20
MAX_RENDER_S = 2.0
"""Time for one prompt, on a thread beside the event loop."""

_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
)
"""What a template raises over messages it was not written for."""


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}``: marks assistant text for training; here plain."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Replace the block by its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    # Jinja's own tojson escapes HTML characters, which no prompt wants.
    allowed = {key: options[key] for key in ("separators", "sort_keys") if key in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **allowed)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


class TemplateTimeout(InvalidRequest):
    """The template did not finish in its time."""


def _environment() -> LimitedEnvironment:
    environment = LimitedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    environment.add_filter("tojson", _tojson)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled chat template."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile ``source``.

        Args:
            source: Jinja text.
            special_tokens: Variables such as ``bos_token`` and ``eos_token``.

        Raises:
            ConfigError: not valid Jinja, or too long.
        """
        if len(source) > MAX_SOURCE_CHARS:
            raise ConfigError(f"model: the chat template is over {MAX_SOURCE_CHARS} characters")
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"model: chat template line {error.lineno}: {error}") from error
        self.source = source
        self.knows_tools = "tools" in names
        """Whether it shows the ``tools`` variable, calls and results to its model."""
        self._special_tokens = dict(special_tokens or {})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        time_s: float = MAX_RENDER_S,
    ) -> str:
        """Render the prompt text.

        Raises:
            TemplateTimeout: it takes longer than ``time_s``.
            InvalidRequest: the template refuses these messages, or the prompt is too large.
        """
        context = {
            **self._special_tokens,
            **(variables or {}),
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        context.setdefault("tools", None)
        context.setdefault("documents", None)
        pieces: list[str] = []
        size = 0
        token = BUDGET.set(Budget(time_s))
        try:
            for piece in self._template.generate(context):
                size += len(piece)
                if size > MAX_TEXT_CHARS:
                    raise BudgetExceeded("the rendered prompt is too large")
                pieces.append(piece)
        except TimeExceeded as error:
            raise TemplateTimeout(f"chat template: {error}", param="messages") from error
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(f"chat template: {error}", param="messages") from error
        except RecursionError as error:
            raise InvalidRequest("chat template: nested too deep", param="messages") from error
        finally:
            BUDGET.reset(token)
        text = "".join(pieces)
        if continue_final_message:
            return _cut_after_final_message(text, messages[-1]["content"])
        return text


def _cut_after_final_message(text: str, content: str) -> str:
    """End the prompt right after the last message, so that the model goes on with it."""
    stripped = content.strip()
    start = text.rfind(stripped)
    if start < 0:
        raise InvalidRequest(
            "the chat template does not show the final message, so it cannot be continued",
            param="continue_final_message",
        )
    unstripped = content.lstrip()
    whole = text.startswith(unstripped, start)
    return text[: start + len(unstripped if whole else stripped)]
