"""Tools over HTTP: into the prompt, to the workers as a grammar, and out of the text as calls."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import msgspec
import pytest

from gateway.openai import answer as answer_schema
from gateway.prompts.chat_template import ChatTemplate
from gateway.prompts.served_model import ServedModel
from gateway.tools.format import FORMATS, format_of_template
from tests.unit.gateway.client import CHAT, COMPLETIONS, MESSAGES, Client
from tests.unit.gateway.scripted_cluster import Script, ScriptedCluster, wait_until

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
OTHER = {"type": "function", "function": {"name": "stop"}}
DEEP: Any = {}
for _ in range(300):
    DEEP = {"items": DEEP}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln 😀"}}\n</tool_call>'
HISTORY = [
    {"role": "user", "content": "Weather in Rome?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_2", "content": "warm"},
]


def says(model: ServedModel, text: str) -> Script:
    return Script(
        answer=[*model.tokenizer.encode(text, add_special_tokens=False), *model.eos_token_ids]
    )


async def answering(client: Client, cluster: ScriptedCluster, text: str) -> None:
    """Workers that say ``text``."""
    await cluster.pair(says(cluster.model, text))
    await cluster.show_all()


async def stream(client: Client, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": MESSAGES, "stream": True, **fields}
    async with client.session.post(client.cluster.url + CHAT, json=body) as response:
        assert response.status == 200, await response.text()
        lines = [line async for line in response.content if line != b"\n"]
    assert lines[-1] == b"data: [DONE]\n"
    return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream makes, as the openai package accumulates it."""
    content, calls = "", []
    for event in events:
        delta = event["choices"][0]["delta"]
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                assert set(call) == {"index", "id", "type", "function"}
                calls.append({key: call[key] for key in ("id", "type", "function")})
            else:
                assert set(call) == {"index", "function"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {"content": content or None, "tool_calls": calls}


def prompt_of(cluster: ScriptedCluster) -> str:
    (request,) = cluster.workers[0].seen.requests
    ids = request.token_ids[: request.num_prompt_tokens]
    return cluster.model.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("choice", [None, "auto", "required"])
async def test_calls_come_out_of_the_text(
    client: Client, cluster: ScriptedCluster, choice: str | None
) -> None:
    await answering(client, cluster, f"I look.\n{CALL}\n{CALL}")
    fields = {"tools": [TOOL], "tool_choice": choice}
    answer = await client.chat(**fields)
    msgspec.convert(answer, answer_schema.ChatAnswer)
    whole = answer["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    message = whole["message"]
    assert message["content"] == "I look."
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    for call in message["tool_calls"]:
        assert call["type"] == "function"
        assert call["function"]["name"] == "get_weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Köln 😀"}
    events = await stream(client, **fields)
    msgspec.convert(events, list[answer_schema.ChatChunk])
    streamed = joined(events)
    for call, other in zip(streamed["tool_calls"], message["tool_calls"], strict=True):
        assert call["function"] == other["function"]
    assert streamed["content"] == "I look."
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["tool_calls"]


async def test_required_arguments_stream_in_pieces(
    client: Client, cluster: ScriptedCluster
) -> None:
    await answering(client, cluster, CALL)
    events = await stream(client, tools=[TOOL], tool_choice="required")
    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert len(calls) > 4, "the arguments came in one piece"


async def test_text_without_a_call_is_content(client: Client, cluster: ScriptedCluster) -> None:
    text = 'No call: <tool_call>{"name": "rm", "arguments": {}}</tool_call>\n'
    await answering(client, cluster, text)
    for fields in ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}, {}):
        choice = (await client.chat(**fields))["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": text}
        assert choice["finish_reason"] == "stop"
        events = await stream(client, **fields)
        assert joined(events) == {"content": text, "tool_calls": []}


async def test_without_parallel_calls_the_first_one_ends_the_answer(
    client: Client, cluster: ScriptedCluster
) -> None:
    script = says(cluster.model, CALL * 200)
    script.delay_s = 0.002  # so that the abort finds it running
    await cluster.pair(script)
    await cluster.show_all()
    answer = await client.chat(tools=[TOOL], parallel_tool_calls=False)
    (choice,) = answer["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens"] < 60
    await wait_until(lambda: not any(worker.num_running for worker in cluster.workers))


async def test_a_call_that_is_cut_off_has_reason_length(
    client: Client, cluster: ScriptedCluster
) -> None:
    await answering(client, cluster, CALL)
    answer = await client.chat(tools=[TOOL], tool_choice="required", max_tokens=22)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert '{"city": "Köln 😀"}'.startswith(arguments)


@pytest.mark.parametrize(
    ("fields", "has", "has_not"),
    [
        ({"tool_choice": "required"}, ("get_weather", "stop", "calls"), ("TEXT",)),
        (
            {"tool_choice": {"type": "function", "function": {"name": "stop"}}},
            ("stop",),
            ("get_weather", "TEXT"),
        ),
        ({"tools": [STRICT, OTHER]}, ("TEXT", "get_weather", "stop"), ()),
        ({"response_format": {"type": "json_object"}}, ("answer", "get_weather"), ("TEXT",)),
    ],
)
async def test_grammars_of_calls(
    client: Client,
    cluster: ScriptedCluster,
    fields: dict[str, Any],
    has: tuple[str, ...],
    has_not: tuple[str, ...],
) -> None:
    await answering(client, cluster, "hi")
    await client.chat(**{"tools": [TOOL, OTHER], **fields})
    grammar = cluster.workers[0].seen.requests[0].sampling.grammar
    assert all(part in grammar for part in has)
    assert not any(part in grammar for part in has_not)


async def test_a_template_without_tools_is_told_in_the_system_prompt(
    client: Client, cluster: ScriptedCluster
) -> None:
    await answering(client, cluster, "hi")
    await client.chat(messages=[{"role": "system", "content": "Be nice."}, *HISTORY], tools=[TOOL])
    prompt = prompt_of(cluster)
    system, user, assistant, results, _ = prompt.split("<|im_end|>")
    assert system.startswith("<|im_start|>system\nBe nice.\n\n")
    assert '"name": "get_weather", "description": "Weather of a city."' in system
    assert "Weather in Rome?" in user
    call = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
    assert assistant.endswith(f"assistant\n<tool_call>\n{call}\n</tool_call>")
    assert results.startswith("\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n")
    assert "warm" in results


async def test_tokenize_counts_the_tools(client: Client, cluster: ScriptedCluster) -> None:
    await answering(client, cluster, "hi")
    usage = (await client.chat(tools=[TOOL]))["usage"]
    _, counted = await client.post("/tokenize", {"messages": MESSAGES, "tools": [TOOL]})
    assert counted["count"] == usage["prompt_tokens"]


async def test_tools_that_must_not_be_called_are_not_in_the_prompt(
    client: Client, cluster: ScriptedCluster
) -> None:
    await answering(client, cluster, "hi")
    await client.chat(tools=[TOOL], tool_choice="none")
    assert "get_weather" not in prompt_of(cluster)


NATIVE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments.city }}{% endfor %}{{ m.tool_call_id }}{% endfor %}<tool_call>"
)


async def test_a_template_with_tools_gets_them_as_it_knows_them(
    model: ServedModel, blockbuster: object
) -> None:
    template = ChatTemplate(NATIVE)
    assert template.knows_tools
    native = msgspec.structs.replace(model, chat_template=template)
    cluster = ScriptedCluster(native)
    await cluster.start()
    try:
        async with aiohttp.ClientSession() as session:
            client = Client(cluster, session)
            await answering(client, cluster, "hi")
            await client.chat(messages=HISTORY, tools=[TOOL])
            assert prompt_of(cluster) == (
                json.dumps([TOOL]) + "[user]Weather in Rome?[assistant]get_weatherRome"
                "[tool]sunnycall_1[tool]warmcall_2<tool_call>"
            )
    finally:
        await cluster.close()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]},
         "tools[0].function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
        ),
        ({"tools": [STRICT, {**STRICT, "function": {**STRICT["function"], "name": "g",
          "parameters": {"not": {}}}}]}, "tools"),
        ({"messages": [*MESSAGES, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [{"role": "user", "tool_calls": HISTORY[1]["tool_calls"]}]},
         "messages[0].tool_calls"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)  # fmt: skip
async def test_bad_tools_are_refused_by_name(
    client: Client, cluster: ScriptedCluster, fields: dict[str, Any], param: str
) -> None:
    await answering(client, cluster, "hi")
    status, body = await client.post(CHAT, {"messages": MESSAGES, **fields})
    assert (status, body["error"]["param"]) == (400, param), body
    assert not cluster.workers[0].seen.requests


@pytest.mark.parametrize("arguments", ["[1]", "{", "x", '{"a":' * 300 + "1" + "}" * 300])
async def test_arguments_of_earlier_calls_must_be_objects(
    client: Client, cluster: ScriptedCluster, arguments: str
) -> None:
    await answering(client, cluster, "hi")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    status, body = await client.post(
        CHAT, {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]}
    )
    assert status == 400
    assert body["error"]["param"] == "messages[1].tool_calls[0].function.arguments"


async def test_tools_are_for_chat(client: Client, cluster: ScriptedCluster) -> None:
    await answering(client, cluster, "hi")
    status, body = await client.post(COMPLETIONS, {"prompt": "x", "tools": [TOOL]})
    assert (status, body["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("<tool_call> {{ tools }}", "hermes"),
        ("{{ tools }} {'\"parameters\": '} <|python_tag|>", "llama3"),
        ("[TOOL_CALLS] {{ tools }}", "mistral"),
        ("{{ tools }}", "hermes"),
        ("", "hermes"),
    ],
)
def test_the_template_shows_the_format(source: str, name: str) -> None:
    assert format_of_template(source) is FORMATS[name]
