"""Fields that say what the output follows: to the workers as a grammar, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gateway.client import CHAT, COMPLETIONS, MESSAGES, Client
from tests.unit.gateway.scripted_cluster import Script, ScriptedCluster

DEEP: Any = {}
for _ in range(300):
    DEEP = {"items": DEEP}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def json_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    fields = {"name": "s", "schema": schema, **fields}
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


@pytest.fixture
async def ready(client: Client, cluster: ScriptedCluster, script: Script) -> Client:
    await cluster.pair(script)
    await cluster.show_all()
    return client


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        (json_schema(SCHEMA, strict=True), '"a"'),
        ({"response_format": {"type": "json_object"}}, '"object"'),
        ({"structured_outputs": {"json": SCHEMA}}, '"a"'),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, '"null"'),
        ({"structured_outputs": {"json_object": True}}, '"object"'),
        ({"structured_outputs": {"regex": "[a-c]/d"}}, "[a-c]"),
        ({"structured_outputs": {"choice": ['say "é"\n', ""]}}, r"say \"é\"\n"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]+'}}, "[0-9]"),
        ({"structured_outputs": {"grammar": 'start: "a" /[0-9]+/'}}, "[0-9]"),
        ({"guided_json": SCHEMA}, '"a"'),
        ({"guided_regex": "x{3}"}, "x{3}"),
        ({"guided_choice": ["x", "y"]}, '"y"'),
        ({"guided_grammar": 'root ::= "a"'}, '"a"'),
    ],
)
async def test_the_grammar_reaches_both_workers(
    ready: Client, cluster: ScriptedCluster, fields: dict[str, Any], part: str
) -> None:
    await ready.chat(**fields, max_tokens=3)
    await ready.complete(**fields)
    grammars = [r.sampling.grammar for worker in cluster.workers for r in worker.seen.requests]
    assert len(grammars) == 4
    assert len(set(grammars)) == 1
    assert part in grammars[0]


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": None}]
)
async def test_free_text_has_no_grammar(
    ready: Client, cluster: ScriptedCluster, fields: dict[str, Any]
) -> None:
    await ready.chat(**fields, max_tokens=3)
    assert {r.sampling.grammar for w in cluster.workers for r in w.seen.requests} == {""}


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        (json_schema({"type": "thing"}), "response_format.json_schema.schema", "thing"),
        (json_schema({"not": {}}), "response_format.json_schema.schema", "not"),
        (json_schema({"type": "string", "pattern": "(?=a)"}),
         "response_format.json_schema.schema", "look-around"),
        (json_schema({"type": "integer", "minimum": 3, "maximum": 1}),
         "response_format.json_schema.schema", "minimum"),
        (json_schema(DEEP), "response_format.json_schema.schema", "nested"),
        (json_schema(None), "response_format.json_schema", "schema"),
        (json_schema(SCHEMA, name="a b"), "response_format.json_schema.name", ""),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", ""),
        ({"response_format": {"type": "grammar"}}, "response_format.type", ""),
        ({"structured_outputs": {}}, "structured_outputs", ""),
        ({"structured_outputs": {"structural_tag": "x"}},
         "structured_outputs.structural_tag", "unknown"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "object"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", ""),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", ""),
        ({"guided_grammar": "root ::= other"}, "guided_grammar", ""),
        ({"guided_grammar": "root ::= " + "(" * 9999}, "guided_grammar", ""),
        ({"guided_regex": "a" * 70_000}, "guided_regex", ""),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", ""),
    ],
)  # fmt: skip
async def test_what_cannot_be_followed_is_refused_by_name(
    ready: Client, cluster: ScriptedCluster, fields: dict[str, Any], param: str, reason: str
) -> None:
    for path, prompt in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "x"})):
        status, body = await ready.post(path, {**prompt, **fields})
        assert status == 400, body
        assert body["error"]["param"] == param
        assert param in body["error"]["message"]
        assert reason in body["error"]["message"]
    assert not any(worker.seen.requests for worker in cluster.workers)


async def test_a_model_cannot_be_asked_for_text_after_json(ready: Client) -> None:
    status, body = await ready.post(
        CHAT,
        {"messages": MESSAGES, "guided_regex": "a", "tools": [
            {"type": "function", "function": {"name": "f"}}]},
    )  # fmt: skip
    assert (status, body["error"]["param"]) == (400, "guided_regex")


@pytest.mark.parametrize("field", [{"allowed_token_ids": [5, 6]}, {"bad_words": ["x"]}])
async def test_token_masks_and_a_grammar_exclude_each_other(
    ready: Client, field: dict[str, Any]
) -> None:
    status, body = await ready.post(COMPLETIONS, {"prompt": "x", "guided_regex": "a", **field})
    assert (status, [body["error"]["param"]]) == (400, list(field))
