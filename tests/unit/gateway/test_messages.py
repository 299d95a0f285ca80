"""The Messages API: its events, its objects, its errors, and what becomes of its messages."""

from __future__ import annotations

import io
import json
from typing import Any

import anthropic
import msgspec
import pydantic
import pytest
from anthropic.types import message_count_tokens_params, message_create_params

from gateway.anthropic import answer as messages_answer
from gateway.anthropic.input import messages_to_chat
from gateway.anthropic.schema import (
    CountTokensRequest,
    MessagesRequest,
    decode_messages_request,
)
from gateway.request.decoding import refused_fields
from gateway.request.schema import ChatRequest
from tests.unit.gateway.client import Client
from tests.unit.gateway.events import Event, kinds, stream_events
from tests.unit.gateway.scripted_cluster import Script, ScriptedCluster, wait_until
from tests.unit.gateway.test_tools import CALL, answering, prompt_of

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
CACHED = {"cache_control": {"type": "ephemeral"}}
USER = [{"role": "user", "content": "hi"}]
TOOL = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    **CACHED,
}
HISTORY: list[Event] = [
    {"role": "user", "content": [{"type": "text", "text": "Rome?", **CACHED}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": "xyz"},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "id": "toolu_2", "name": "get_weather", "input": {}, **CACHED},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"},
        {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True,
         "content": [{"type": "text", "text": "no such city"}]},
        {"type": "text", "text": "And"},
    ]},
    {"role": "user", "content": "now?"},
]  # fmt: skip

BEGIN = ["message_start", "ping"]
BLOCK = ["content_block_start", "content_block_delta", "content_block_stop"]
END = ["message_delta", "message_stop"]

_event_type: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(anthropic.types.RawMessageStreamEvent)


def check(events: list[Event]) -> None:
    """As documented, and as the ``anthropic`` package has them."""
    union: Any = messages_answer.EVENTS[0]
    for kind in messages_answer.EVENTS[1:]:
        union |= kind
    msgspec.convert(events, list[union])
    for event in events:
        if event["type"] not in ("ping", "error"):
            _event_type.validate_python(event)


def body(**fields: Any) -> Event:
    return {"messages": USER, "max_tokens": 100, **fields}


async def create(client: Client, **fields: Any) -> Event:
    status, answer = await client.post(PATH, body(**fields))
    assert status == 200, answer
    msgspec.convert(answer, messages_answer.Message)
    anthropic.types.Message.model_validate(answer)
    return answer


def joined(events: list[Event]) -> Event:
    """The message that a stream makes."""
    message = dict(events[0]["message"])
    texts: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"] = [*message["content"], event["content_block"]]
            texts.append("")
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            texts[event["index"]] += delta.get("text") or delta.get("partial_json")
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    for block, text in zip(message["content"], texts, strict=True):
        if block["type"] == "text":
            block["text"] = text
        else:
            block["input"] = json.loads(text)
    return message


def without_ids(message: Event) -> Event:
    content = [
        {key: value for key, value in block.items() if key != "id"} for block in message["content"]
    ]
    return message | {"id": "", "content": content}


async def test_events_of_a_text(client: Client, cluster: ScriptedCluster, script: Script) -> None:
    script.num_cached_tokens = 4
    await cluster.pair(script)
    await cluster.show_all()
    whole = await create(client)
    assert whole["content"] == [{"type": "text", "text": "Hello wörld 日本 😀 yes"}]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
    _, counted = await client.post(COUNT, {"messages": USER})
    assert whole["usage"]["cache_read_input_tokens"] == 4
    assert whole["usage"]["input_tokens"] == counted["input_tokens"] - 4
    assert whole["usage"]["output_tokens"] == len(script.answer)
    events = await stream_events(client, PATH, body())
    check(events)
    assert kinds(events) == [*BEGIN, *BLOCK, *END]
    assert events[0]["message"]["usage"]["output_tokens"] == 1
    assert sum(event["type"] == "content_block_delta" for event in events) > 4
    assert without_ids(joined(events)) == without_ids(whole)


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "any"}])
async def test_events_of_text_and_calls(
    client: Client, cluster: ScriptedCluster, choice: Event
) -> None:
    await answering(client, cluster, f"I look.\n{CALL}\n{CALL}")
    fields = {"tools": [TOOL], "tool_choice": choice}
    whole = await create(client, **fields)
    assert whole["stop_reason"] == "tool_use"
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use", "tool_use"]
    assert whole["content"][1]["input"] == {"city": "Köln 😀"}
    assert len({block["id"] for block in whole["content"][1:]}) == 2
    events = await stream_events(client, PATH, body(**fields))
    check(events)
    assert kinds(events) == [*BEGIN, *BLOCK, *BLOCK, *BLOCK, *END]
    assert without_ids(joined(events)) == without_ids(whole)


async def test_without_parallel_use_the_first_call_ends_it(
    client: Client, cluster: ScriptedCluster
) -> None:
    await answering(client, cluster, CALL * 3)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    whole = await create(client, tools=[TOOL], tool_choice=choice)
    assert [block["type"] for block in whole["content"]] == ["tool_use"]


async def test_stop_sequences_are_named(
    client: Client, cluster: ScriptedCluster, script: Script
) -> None:
    await cluster.pair(script)
    await cluster.show_all()
    fields = {"stop_sequences": ["yes", "本 😀"]}
    whole = await create(client, **fields)
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "本 😀")
    assert whole["content"] == [{"type": "text", "text": "Hello wörld 日"}]
    events = await stream_events(client, PATH, body(**fields))
    check(events)
    assert without_ids(joined(events)) | {"usage": 0} == without_ids(whole) | {"usage": 0}
    other = await create(client, stop_sequences=["never"])
    assert (other["stop_reason"], other["stop_sequence"]) == ("end_turn", None)


async def test_what_ends_an_answer_early_is_named(client: Client, cluster: ScriptedCluster) -> None:
    await cluster.pair(Script(answer=(500,)), max_model_len=64)
    await cluster.show_all()
    assert (await create(client, max_tokens=3))["stop_reason"] == "max_tokens"
    whole = await create(client, max_tokens=32000)
    assert whole["stop_reason"] == "model_context_window_exceeded"
    assert whole["usage"]["input_tokens"] + whole["usage"]["output_tokens"] == 64
    status, answer = await client.post(
        PATH, body(messages=[{"role": "user", "content": "a " * 99}])
    )
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert answer["error"]["message"].startswith("messages: the prompt has")


async def test_input_that_is_cut_off_is_empty(client: Client, cluster: ScriptedCluster) -> None:
    await answering(client, cluster, CALL)
    fields = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}
    whole = await create(client, **fields, max_tokens=22)
    assert whole["stop_reason"] == "max_tokens"
    assert whole["content"][0]["input"] == {}


async def test_a_stream_that_fails_ends_with_an_error(
    client: Client, cluster: ScriptedCluster
) -> None:
    await answering(client, cluster, "one two three four five six")
    for worker in cluster.workers:
        worker.script.fail_at = 3
        worker.script.delay_s = 0.005  # so that token 1 comes before the failure
    events = await stream_events(client, PATH, body())
    check(events)
    assert kinds(events) == [*BEGIN, *BLOCK[:2], "error"]
    assert events[-1]["error"] == {"type": "api_error", "message": "scripted"}


async def test_a_client_that_leaves_frees_the_workers(
    client: Client, cluster: ScriptedCluster
) -> None:
    await cluster.pair(Script(answer=(500,), delay_s=0.01))
    await cluster.show_all()
    url = cluster.url + PATH
    async with client.session.post(url, json=body(stream=True)) as response:
        await response.content.readline()
    await wait_until(lambda: not any(worker.num_running for worker in cluster.workers))
    await wait_until(lambda: cluster.server.num_open_requests == 0)


def converted(**fields: Any) -> ChatRequest:
    return messages_to_chat(decode_messages_request(json.dumps(body(**fields)).encode()))[0]


def test_blocks_become_messages() -> None:
    system = [{"type": "text", "text": "Help.", **CACHED}, {"type": "text", "text": "Be brief."}]
    messages = converted(messages=HISTORY, system=system).messages
    assert [(message.role, message.text) for message in messages] == [
        ("system", "Help.\nBe brief."),
        ("user", "Rome?"),
        ("assistant", "I look."),
        ("tool", "sunny"),
        ("tool", "Error: no such city"),
        ("user", "And\nnow?"),
    ]
    calls = messages[2].tool_calls or []
    assert [(call.id, json.loads(call.function.arguments)) for call in calls] == [
        ("toolu_1", {"city": "Rome"}),
        ("toolu_2", {}),
    ]
    assert [message.tool_call_id for message in messages[3:5]] == ["toolu_1", "toolu_2"]


def test_what_claude_code_sends_is_taken() -> None:
    request = converted(
        system=[{"type": "text", "text": "You are a coding agent.", **CACHED}], messages=HISTORY,
        tools=[TOOL], metadata={"user_id": "user_1"}, max_tokens=32000, stream=True,
        thinking={"type": "adaptive"}, temperature=1, cache_control={"type": "ephemeral"},
    )  # fmt: skip
    assert request.stream
    assert request.metadata is None


async def test_the_answer_goes_on_from_the_assistants_turn(
    client: Client, cluster: ScriptedCluster
) -> None:
    await answering(client, cluster, "hi")
    await create(client, messages=[*USER, {"role": "assistant", "content": "The answer is"}])
    assert prompt_of(cluster).endswith("The answer is")


async def test_history_and_tools_reach_the_prompt(client: Client, cluster: ScriptedCluster) -> None:
    await answering(client, cluster, "hi")
    await create(client, messages=HISTORY, tools=[TOOL], system="Help.")
    prompt = prompt_of(cluster)
    for part in ("Help.", "I look.", '"city": "Rome"', "sunny", "Weather of a city.", "now?"):
        assert part in prompt
    assert "xyz" not in prompt


async def test_sampling_fields_reach_the_workers(client: Client, cluster: ScriptedCluster) -> None:
    await answering(client, cluster, "{}")
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
    form = {"format": {"type": "json_schema", "schema": schema}}
    await create(client, temperature=0.5, top_p=0.6, top_k=7, output_config=form)
    sampling = cluster.workers[0].seen.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.6, 7)
    assert '"age"' in sampling.grammar


async def test_tokens_are_counted_without_workers(client: Client) -> None:
    headers = {"x-api-key": "none", "anthropic-version": "2023-06-01"}
    status, alone = await client.post(f"{COUNT}?beta=true", {"messages": USER}, headers=headers)
    assert status == 200
    _, more = await client.post(COUNT, {"messages": USER, "system": "Help.", "tools": [TOOL]})
    assert 0 < alone["input_tokens"] < more["input_tokens"]
    status, answer = await client.post(COUNT, body())
    assert (status, answer["type"]) == (400, "error")
    assert "max_tokens" in answer["error"]["message"]


def test_every_field_of_the_anthropic_package_is_known() -> None:
    for kind, params in (
        (MessagesRequest, message_create_params.MessageCreateParamsBase),
        (CountTokensRequest, message_count_tokens_params.MessageCountTokensParams),
    ):
        fields = set(params.__annotations__)
        assert len(fields) > 8
        known = {*kind.__struct_fields__, *refused_fields(kind)}
        assert fields <= known
        assert not set(kind.__struct_fields__) & set(refused_fields(kind))


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
        ({"container": "x"}, "container"),
        ({"moood": 1}, "moood"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": HISTORY[1]["content"]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": HISTORY[1]["content"][3:]}]}, "messages"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{"name": "f", "input_schema": {}, "strict": True, "x": 1}]}, "tools[0].x"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
         "output_config.format.schema"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
    ],
)  # fmt: skip
async def test_refusals_name_the_field(
    client: Client, cluster: ScriptedCluster, fields: dict[str, Any], param: str
) -> None:
    await answering(client, cluster, "hi")
    status, answer = await client.post(PATH, body(**fields))
    msgspec.convert(answer, messages_answer.MessageError)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert param in answer["error"]["message"]
    assert not cluster.workers[0].seen.requests


async def test_errors_have_anthropics_shape(client: Client, cluster: ScriptedCluster) -> None:
    for path, fields, status, kind in (
        (PATH, body(), 503, "api_error"),
        (PATH, body(model="other"), 404, "not_found_error"),
        (PATH, b"[" * 100000, 400, "invalid_request_error"),
        (PATH, io.BytesIO(b"x" * (1 << 21)), 413, "request_too_large"),
        (f"{PATH}/batches", {}, 404, "not_found_error"),
    ):
        found, answer = await client.post(path, fields)
        assert (found, answer["error"]["type"]) == (status, kind), answer
        msgspec.convert(answer, messages_answer.MessageError)
    async with client.session.get(cluster.url + PATH) as response:
        assert (response.status, (await response.json())["type"]) == (405, "error")
        assert response.headers["request-id"] == response.headers["x-request-id"]
