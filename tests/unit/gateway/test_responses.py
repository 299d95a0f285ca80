"""The Responses API: its events, its objects, its refusals, and what becomes of its input."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pydantic
import pytest
from openai.types import responses as openai_responses
from openai.types.responses import response_create_params

from gateway.request.decoding import refused_fields
from gateway.request.schema import ChatRequest
from gateway.responses import answer as responses_answer
from gateway.responses.input import responses_to_chat
from gateway.responses.schema import ResponsesRequest, decode_responses_request
from mesh.errors import InvalidRequest
from mesh.messages import RequestFailed
from tests.unit.gateway.client import Client
from tests.unit.gateway.events import Event, kinds, stream_events
from tests.unit.gateway.scripted_cluster import Script, ScriptedCluster, wait_until
from tests.unit.gateway.test_tools import CALL, answering, prompt_of

PATH = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
HISTORY: list[Event] = [
    {"role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rome?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "xyz",
     "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
     "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
    {"type": "function_call", "call_id": "call_1", "name": "get_weather",
     "arguments": '{"city": "Rome"}', "id": "fc_1", "status": "completed"},
    {"type": "function_call", "call_id": "call_2", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
    {"type": "function_call_output", "call_id": "call_2",
     "output": [{"type": "input_text", "text": "warm"}]},
    {"role": "user", "content": "Thanks."},
]  # fmt: skip

TEXT = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
CALLED = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]
BEGIN = ["response.created", "response.in_progress"]

_event_type: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(openai_responses.ResponseStreamEvent)


def check(events: list[Event]) -> None:
    """Numbered, as documented, and as the ``openai`` package has them."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    union: Any = responses_answer.EVENTS[0]
    for kind in responses_answer.EVENTS[1:]:
        union |= kind
    msgspec.convert(events, list[union])
    for event in events:
        _event_type.validate_python(event)


async def create(client: Client, **fields: Any) -> Event:
    status, body = await client.post(PATH, {"input": "hi", **fields})
    assert status == 200, body
    msgspec.convert(body, responses_answer.Response)
    openai_responses.Response.model_validate(body)
    return body


def without_ids(response: Event) -> Event:
    """What a whole and a streamed response have in common."""
    text = json.dumps(response).replace(response["id"].removeprefix("resp_"), "")
    shown = json.loads(text) | {"created_at": 0}
    for item in shown["output"]:
        item.pop("call_id", None)
    return shown


async def test_events_of_a_text(client: Client, cluster: ScriptedCluster, script: Script) -> None:
    await cluster.pair(script)
    await cluster.show_all()
    whole = await create(client)
    assert (whole["status"], whole["error"], whole["incomplete_details"]) == (
        "completed", None, None,
    )  # fmt: skip
    (item,) = whole["output"]
    assert item["content"][0]["text"] == "Hello wörld 日本 😀 yes"
    assert whole["usage"]["output_tokens"] == len(script.answer)
    assert whole["usage"]["total_tokens"] == whole["usage"]["input_tokens"] + len(script.answer)
    events = await stream_events(client, PATH, {"input": "hi"})
    check(events)
    assert kinds(events) == [*BEGIN, *TEXT, "response.completed"]
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    deltas = [event["delta"] for event in events if event["type"].endswith("text.delta")]
    assert len(deltas) > 4
    assert "".join(deltas) == events[-4]["text"]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[-1]["response"]["output"] == [events[-2]["item"]]
    assert len({event["item_id"] for event in events if "item_id" in event}) == 1


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_events_of_text_and_calls(
    client: Client, cluster: ScriptedCluster, choice: str
) -> None:
    await answering(client, cluster, f"I look.\n{CALL}\n{CALL}\nDone.")
    fields = {"tools": [TOOL], "tool_choice": choice}
    events = await stream_events(client, PATH, {"input": "hi", **fields})
    check(events)
    assert kinds(events) == [*BEGIN, *TEXT, *CALLED, *CALLED, *TEXT, "response.completed"]
    whole = await create(client, **fields)
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    assert [item["type"] for item in whole["output"]] == [
        "message", "function_call", "function_call", "message",
    ]  # fmt: skip
    call = whole["output"][1]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Köln 😀"})
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3]
    assert added[1]["item"]["arguments"] == ""
    assert whole["tools"] == [TOOL]
    assert whole["tool_choice"] == choice


async def test_an_answer_that_is_cut_off_is_incomplete(
    client: Client, cluster: ScriptedCluster, script: Script
) -> None:
    await cluster.pair(script)
    await cluster.show_all()
    events = await stream_events(client, PATH, {"input": "hi", "max_output_tokens": 3})
    check(events)
    assert kinds(events) == [*BEGIN, *TEXT, "response.incomplete"]
    response = events[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == events[-2]["item"]["status"] == "incomplete"
    assert (await create(client, max_output_tokens=3))["status"] == "incomplete"


async def test_a_stream_that_fails_says_so(client: Client, cluster: ScriptedCluster) -> None:
    await answering(client, cluster, "one two three four five six")
    for worker in cluster.workers:
        worker.script.fail_at = 3
        worker.script.delay_s = 0.005  # so that token 1 comes before the failure
    events = await stream_events(client, PATH, {"input": "hi"})
    check(events)
    assert kinds(events)[-1] == "response.failed"
    assert "response.output_text.done" not in kinds(events)
    response = events[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert "transfer_failed" in response["error"]["message"]


async def test_before_the_first_token_a_failure_has_its_status(
    client: Client, cluster: ScriptedCluster
) -> None:
    failed = RequestFailed(
        request_id="", transfer_id="", code="invalid_request", message="no", retryable=False
    )
    await cluster.pair(Script(fail=failed))
    await cluster.show_all()
    status, body = await client.post(PATH, {"input": "hi", "stream": True})
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")


async def test_a_client_that_leaves_frees_the_workers(
    client: Client, cluster: ScriptedCluster
) -> None:
    await cluster.pair(Script(answer=(500,), delay_s=0.01))
    await cluster.show_all()
    url = cluster.url + PATH
    async with client.session.post(url, json={"input": "hi", "stream": True}) as response:
        await response.content.readline()
    await wait_until(lambda: not any(worker.num_running for worker in cluster.workers))
    await wait_until(lambda: cluster.server.num_open_requests == 0)


async def test_logprobs_come_with_their_text(
    client: Client, cluster: ScriptedCluster, script: Script
) -> None:
    await cluster.pair(script)
    await cluster.show_all()
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (item,) = (await create(client, **fields))["output"]
    content = item["content"][0]
    text = b"".join(bytes(entry["bytes"]) for entry in content["logprobs"])
    assert text.decode() == content["text"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content["logprobs"])
    events = await stream_events(client, PATH, {"input": "hi", **fields})
    check(events)
    streamed = [
        entry
        for event in events
        if event["type"] == "response.output_text.delta"
        for entry in event["logprobs"]
    ]
    assert streamed == content["logprobs"]


def converted(**fields: Any) -> ChatRequest:
    body = json.dumps({"input": "hi", **fields}).encode()
    return responses_to_chat(decode_responses_request(body))[0]


def test_input_becomes_messages() -> None:
    messages = converted(input=HISTORY, instructions="Help.").messages
    assert [(message.role, message.text) for message in messages] == [
        ("system", "Help."),
        ("developer", "Be brief."),
        ("user", "Rome?"),
        ("assistant", "I look."),
        ("tool", "sunny"),
        ("tool", "warm"),
        ("user", "Thanks."),
    ]
    calls = messages[3].tool_calls or []
    assert [(call.id, call.function.arguments) for call in calls] == [
        ("call_1", '{"city": "Rome"}'),
        ("call_2", "{}"),
    ]
    assert [message.tool_call_id for message in messages[4:6]] == ["call_1", "call_2"]


async def test_history_and_tools_reach_the_prompt(client: Client, cluster: ScriptedCluster) -> None:
    await answering(client, cluster, "hi")
    await create(client, input=HISTORY, tools=[TOOL])
    prompt = prompt_of(cluster)
    for part in ("Be brief.", "I look.", '"city": "Rome"', "sunny", "warm", "Weather of a city."):
        assert part in prompt
    assert "xyz" not in prompt


async def test_a_format_becomes_a_grammar(client: Client, cluster: ScriptedCluster) -> None:
    await answering(client, cluster, "{}")
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "person", "schema": schema, "strict": True}
    assert (await create(client, text={"format": form}))["text"] == {"format": form}
    assert '"age"' in cluster.workers[0].seen.requests[-1].sampling.grammar
    await create(client, text={"format": {"type": "json_object"}})
    assert "%json" in cluster.workers[0].seen.requests[-1].sampling.grammar


def test_an_answer_can_be_sent_back() -> None:
    message = openai_responses.ResponseOutputMessage(
        id="m", type="message", role="assistant", status="completed",
        content=[openai_responses.ResponseOutputText(
            type="output_text", text="Hi.", annotations=[], logprobs=[]
        )],
    )  # fmt: skip
    items = [message.model_dump(), {"role": "user", "content": "More."}]
    assert [one.text for one in converted(input=items).messages] == ["Hi.", "More."]


def test_what_codex_sends_is_taken() -> None:
    request = converted(
        instructions="You are a coding agent.", input=HISTORY, tools=[TOOL], tool_choice="auto",
        parallel_tool_calls=False, reasoning=None, store=False, stream=True,
        include=["reasoning.encrypted_content"], prompt_cache_key="a", client_metadata={"x": "y"},
        text={"verbosity": "medium"}, service_tier=None,
    )  # fmt: skip
    assert request.stream
    assert not request.logprobs


def test_every_field_of_the_openai_package_is_known() -> None:
    fields = set(response_create_params.ResponseCreateParamsBase.__annotations__)
    assert len(fields) > 25
    known = {*ResponsesRequest.__struct_fields__, *refused_fields(ResponsesRequest)}
    assert fields | {"stream"} <= known
    assert not set(ResponsesRequest.__struct_fields__) & set(refused_fields(ResponsesRequest))


BAD_FORMAT = {"type": "json_schema", "name": "a", "schema": {"not": {}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"moood": 1}, "moood"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{**TOOL, "strict": True, "parameters": {"not": {}}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"max_output_tokens": 9000}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": BAD_FORMAT}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "x", "call_id": "1"}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [*HISTORY[:4], {**HISTORY[4], "arguments": "[1]"}, *HISTORY[6:7]]},
            "input[4].arguments",
        ),
        ({"input": "word " * 9000}, "input"),
    ],
)  # fmt: skip
async def test_refusals_name_the_field(
    client: Client, cluster: ScriptedCluster, fields: dict[str, Any], param: str
) -> None:
    await answering(client, cluster, "hi")
    status, body = await client.post(PATH, {"input": "hi", **fields})
    assert (status, body["error"]["param"]) == (400, param), body
    assert "messages" not in body["error"]["message"]
    assert not cluster.workers[0].seen.requests


def test_too_many_items_are_refused_before_they_are_turned() -> None:
    with pytest.raises(InvalidRequest, match="input"):
        converted(input=[{"role": "user", "content": "x"}] * 5000)
