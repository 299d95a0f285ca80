"""Random texts of the tool grammars: what can be generated parses into valid calls."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from gateway.prompts.served_model import ServedModel
from gateway.request.tool_fields import FunctionDefinition
from gateway.structured.output_form import json_rule
from gateway.tools.format import FORMATS, ToolFormat, ToolFormatName
from gateway.tools.grammar import ToolGrammar
from gateway.tools.parser import ToolCallParser
from mesh.model_text.grammar import GrammarVocabulary

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
FUNCTIONS = [
    FunctionDefinition(
        name="f",
        strict=True,
        parameters={
            "type": "object",
            "properties": {"x": DIGIT},
            "required": ["x"],
            "additionalProperties": False,
        },
    ),
    FunctionDefinition(
        name="ns.g",
        parameters={
            "properties": {"y": {"enum": ["}", '"', "</tool_call>"]}},
            "required": ["y"],
            "additionalProperties": False,
            "not": {},
        },
    ),
]
SPECIAL = 4
"""A special token of the packaged model, to stand for a trigger that is one."""


@pytest.fixture(scope="module")
def vocabulary(model: ServedModel) -> GrammarVocabulary:
    return GrammarVocabulary(model.tokenizer, model.tokenizer.vocab_size)


def walk(
    vocabulary: GrammarVocabulary, grammar: str, seed: int, start: Sequence[int] = ()
) -> list[int]:
    """Tokens of a random text of ``grammar`` that begins with ``start``."""
    matcher = vocabulary.compile(grammar)
    random = np.random.default_rng(seed)
    tokens = list(start)
    assert matcher.consume_tokens(tokens)
    while len(tokens) < 400:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        count = vocabulary.num_tokens + 1
        allowed = np.flatnonzero(np.unpackbits(bits, count=count, bitorder="little"))
        if vocabulary.end_id in allowed and (len(allowed) == 1 or random.random() < 0.3):
            return tokens
        tokens.append(int(random.choice(allowed[allowed != vocabulary.end_id])))
        assert matcher.consume_token(tokens[-1])
    raise AssertionError("the text does not end")


def calls_of(
    model: ServedModel, form: ToolFormat, tokens: list[int], trigger_id: int | None
) -> tuple[str, list[tuple[str, object]]]:
    pieces = list(model.tokenizer.pieces)
    if trigger_id is not None:
        pieces[trigger_id] = form.trigger.encode()
    text = b"".join(pieces[token] for token in tokens).decode()
    parser = ToolCallParser(form, [f.name for f in FUNCTIONS], guaranteed=True)
    content, calls = "", []
    for parsed in (*map(parser.push, text), parser.finish()):
        content += parsed.content
        for call in parsed.calls:
            if call.id:
                calls.append([call.name, ""])
            calls[-1][1] += call.arguments
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def check(calls: list[tuple[str, object]]) -> None:
    for name, arguments in calls:
        assert isinstance(arguments, dict)
        if name == "f":
            assert set(arguments) == {"x"}
            assert 0 <= arguments["x"] <= 9
        else:
            assert name == "ns.g"
            assert arguments["y"] in ("}", '"', "</tool_call>")


@pytest.mark.parametrize("trigger_id", [None, SPECIAL])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_calls_only(
    model: ServedModel, vocabulary: GrammarVocabulary, name: ToolFormatName, trigger_id: int | None
) -> None:
    form = FORMATS[name]
    counts = set()
    for parallel in (True, False):
        grammar = ToolGrammar(form, FUNCTIONS, trigger_id=trigger_id, parallel=parallel)
        for seed in range(6):
            tokens = walk(vocabulary, grammar.calls_only(), seed)
            content, calls = calls_of(model, form, tokens, trigger_id)
            check(calls)
            assert content == ""
            assert calls
            assert parallel or len(calls) == 1
            counts.add(len(calls))
    assert len(counts) > 1, "more than one call was never made"


@pytest.mark.parametrize("trigger_id", [None, SPECIAL])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_text_in_which_calls_begin(
    model: ServedModel, vocabulary: GrammarVocabulary, name: ToolFormatName, trigger_id: int | None
) -> None:
    form = FORMATS[name]
    grammar = ToolGrammar(form, FUNCTIONS, trigger_id=trigger_id, parallel=True).text_with_calls()
    begin = "{" if form.is_whole_answer else "So: "
    start = model.tokenizer.encode(begin, add_special_tokens=False)
    if not form.is_whole_answer:
        trigger = model.tokenizer.encode(form.trigger, add_special_tokens=False)
        start += trigger if trigger_id is None else [trigger_id]
    for seed in range(6):
        tokens = walk(vocabulary, grammar, seed, start)
        _, calls = calls_of(model, form, tokens, trigger_id)
        assert calls, "what began as a call did not become one"
        check(calls)
    free = model.tokenizer.encode("Just text.", add_special_tokens=False)
    content, calls = calls_of(model, form, walk(vocabulary, grammar, 1, free), trigger_id)
    assert content.startswith("Just text.")


def test_json_or_calls(model: ServedModel, vocabulary: GrammarVocabulary) -> None:
    rule = json_rule({"type": "array", "items": DIGIT, "maxItems": 3})
    form = FORMATS["hermes"]
    grammar = ToolGrammar(form, FUNCTIONS, trigger_id=None, parallel=True).calls_or(rule)
    seen = set()
    for seed in range(12):
        content, calls = calls_of(model, form, walk(vocabulary, grammar, seed), None)
        seen.add(bool(calls))
        assert bool(calls) != bool(content)
        if content:
            assert isinstance(json.loads(content), list)
        check(calls)
    assert seen == {True, False}
