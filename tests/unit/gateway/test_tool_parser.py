"""Tool calls are found in text however it is cut, and nothing of it is lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tools.format import FORMATS, ToolFormat, ToolFormatName
from gateway.tools.parser import ToolCallParser

NAMES = ("get_weather", "f")
HERMES, LLAMA3, MISTRAL = FORMATS["hermes"], FORMATS["llama3"], FORMATS["mistral"]

Calls = list[tuple[str, str]]


def parse(parser: ToolCallParser, pieces: Sequence[str]) -> tuple[str, Calls]:
    """Content, and (name, arguments) of every call; asserts the order of its deltas."""
    content = ""
    calls: list[list[str]] = []
    ids = set()
    for parsed in [*map(parser.push, pieces), parser.finish()]:
        content += parsed.content
        for call in parsed.calls:
            if call.id:
                assert call.index == len(calls), "calls begin in order"
                assert call.name
                ids.add(call.id)
                calls.append([call.name, call.arguments])
            else:
                assert call.index == len(calls) - 1, "only the last call grows"
                assert not call.name
                calls[-1][1] += call.arguments
    assert len(ids) == len(calls) == parser.num_calls
    return content, [(name, arguments) for name, arguments in calls]


def write(form: ToolFormat, calls: Calls) -> str:
    """What a model writes to call."""
    bodies = [
        f"{form.call_opening}{form.head(name)}{arguments}}}{form.call_closing}"
        for name, arguments in calls
    ]
    return form.opening + form.separator.join(bodies) + form.closing


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
arguments_objects = st.dictionaries(st.text(max_size=6), json_values, max_size=3).map(json.dumps)
call_lists = st.lists(st.tuples(st.sampled_from(NAMES), arguments_objects), min_size=1, max_size=3)


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    places = draw(st.lists(st.integers(0, len(text)), max_size=12))
    edges = [0, *sorted(places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@given(st.data(), call_lists, st.sampled_from(sorted(FORMATS)), st.booleans())
def test_calls_are_found_wherever_the_text_is_cut(
    data: st.DataObject, calls: Calls, name: ToolFormatName, guaranteed: bool
) -> None:
    form = FORMATS[name]
    before = "" if form.is_whole_answer else data.draw(st.sampled_from(["", "I look.", "a < b "]))
    text = before + write(form, calls)
    parser = ToolCallParser(form, NAMES, guaranteed=guaranteed)
    content, found = parse(parser, data.draw(cut(text)))
    assert content == before.rstrip()
    assert [name for name, _ in found] == [name for name, _ in calls]
    for (_, arguments), (_, expected) in zip(found, calls, strict=True):
        assert json.loads(arguments) == json.loads(expected)


PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "[",
        "]",
        "{",
        "}",
    ),
    *(
        '"name": ',
        '"arguments": ',
        '"parameters": ',
        '"f"',
        '"g"',
        ", ",
        "; ",
        "\n",
        " ",
        "\\",
        '"',
    ),
    *("text", "é", '{"x": 1}', '{"name": "f", "arguments": {"x": 1}}'),
    *('{"name": "f", "parameters": {}}', '{"name": "g", "arguments": {}}'),
]


@given(st.data(), st.lists(st.sampled_from(PIECES), max_size=14), st.sampled_from(sorted(FORMATS)))
def test_any_text_gives_the_same_in_one_piece_and_in_many(
    data: st.DataObject, parts: list[str], name: ToolFormatName
) -> None:
    text = "".join(parts)
    whole = parse(ToolCallParser(FORMATS[name], NAMES), [text])
    assert parse(ToolCallParser(FORMATS[name], NAMES), data.draw(cut(text))) == whole
    if not whole[1]:
        assert whole[0] == text, "without a call all of it is content"


@pytest.mark.parametrize(
    "text",
    [
        "plain text, a < b, [x]",
        "<tool_call>",
        "<tool_call>not JSON</tool_call>",
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        '<tool_call>{"name": "f"}</tool_call> and more',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": 1}',
        '<tool_call>{"name": "f", "arguments": {x}}</tool_call>\n',
        "ends with a part of it <tool_ca",
        "  white space  ",
    ],
)
def test_what_is_no_call_stays_content(text: str) -> None:
    for pieces in ([text], list(text)):
        assert parse(ToolCallParser(HERMES, NAMES), pieces) == (text, [])


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", "{}")]),
        (HERMES, '<tool_call>{"arguments": {}, "name": "f"}</tool_ca', "", [("f", "{}")]),
        (HERMES, "x <tool_call>{} </tool_call>", "x <tool_call>{} </tool_call>", []),
        (
            HERMES,
            'a <tool_call>{"name": "f", "arguments": {}}</tool_call>\n b \n'
            '<tool_call> {"name": "f", "arguments": {"a": "</tool_call>"}} </tool_call>\n',
            "a\n b",
            [("f", "{}"), ("f", '{"a": "</tool_call>"}')],
        ),
        (LLAMA3, ' {"name": "f", "parameters": {}}', "", [("f", "{}")]),
        (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        (LLAMA3, '{"answer": 5} is it', '{"answer": 5} is it', []),
        (LLAMA3, 'so {"name": "f", "parameters": {}}', 'so {"name": "f", "parameters": {}}', []),
        (MISTRAL, '[TOOL_CALLS] [ {"name": "f", "arguments": {}} ]', "", [("f", "{}")]),
        (MISTRAL, "[TOOL_CALLS] x", "[TOOL_CALLS] x", []),
        (MISTRAL, "[1, 2]", "[1, 2]", []),
    ],
)
def test_texts_of_the_formats(form: ToolFormat, text: str, content: str, calls: Calls) -> None:
    for pieces in ([text], list(text)):
        assert parse(ToolCallParser(form, NAMES), pieces) == (content, calls)


@pytest.mark.parametrize("guaranteed", [False, True])
def test_the_last_call_that_may_be_made_ends_it(guaranteed: bool) -> None:
    parser = ToolCallParser(HERMES, NAMES, guaranteed=guaranteed, max_calls=1)
    text = write(HERMES, [("f", '{"x": 1}'), ("f", "{}")])
    taken = ""
    while not parser.is_full:
        taken += text[len(taken)]
        parser.push(taken[-1])
    assert taken == text[: text.index("}}") + 2]
    assert parser.push("more").content == ""
    assert parser.finish().content == ""


def test_guaranteed_arguments_stream() -> None:
    parser = ToolCallParser(HERMES, NAMES, guaranteed=True)
    deltas: list[Any] = []
    for character in write(HERMES, [("get_weather", '{"city": "Rom"}')]):
        deltas += parser.push(character).calls
    first, *others = deltas
    assert (first.name, first.arguments) == ("get_weather", "")
    assert [delta.arguments for delta in others] == list('{"city": "Rom"}')


def test_a_guaranteed_call_that_is_cut_off_keeps_what_came() -> None:
    text = write(HERMES, [("f", '{"city": "Rome"}')])
    at = text.index("Rome") + 2
    parser = ToolCallParser(HERMES, NAMES, guaranteed=True)
    assert parse(parser, list(text[:at])) == ("", [("f", '{"city": "Ro')])
