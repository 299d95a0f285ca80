"""The ``anthropic`` package as a client, pointed at the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from tests.integration.conftest import on
from tests.integration.running_cluster import RunningCluster

pytestmark = on("int8-1p1d")

QUESTION: Any = [{"role": "user", "content": "What is the capital of Japan?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "cache_control": {"type": "ephemeral"},
}


@pytest.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=cluster.url, api_key="none", max_retries=0
    ) as client:
        yield client


async def test_create_and_stream(cluster: RunningCluster, client: anthropic.AsyncAnthropic) -> None:
    fields: Any = {
        "model": cluster.model,
        "messages": QUESTION,
        "max_tokens": 32,
        "extra_body": {"temperature": 0},
    }
    whole = await client.messages.create(**fields)
    (block,) = whole.content
    assert block.type == "text"
    assert "Tokyo" in block.text
    assert whole.stop_reason == "end_turn"
    async with client.messages.stream(**fields) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        streamed = await stream.get_final_message()
    assert text == block.text
    assert streamed.content[0].model_dump()["text"] == text
    assert streamed.stop_reason == "end_turn"
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    stopped = await client.messages.create(**fields, stop_sequences=["Tok"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Tok")
    assert stopped.content[0].model_dump()["text"] == block.text.partition("Tok")[0]


async def test_tools_there_and_back(
    cluster: RunningCluster, client: anthropic.AsyncAnthropic
) -> None:
    messages: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]
    fields: Any = {"model": cluster.model, "tools": [WEATHER], "max_tokens": 64}
    async with client.messages.stream(
        **fields,
        messages=messages,
        tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
    ) as stream:
        answer = await stream.get_final_message()
    assert answer.stop_reason == "tool_use"
    (call,) = answer.content
    assert call.type == "tool_use"
    assert call.name == "get_weather"
    assert set(call.input) == {"city"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    after = await client.messages.create(
        **fields, messages=messages, tool_choice={"type": "none"}, system="Be brief."
    )
    assert after.content[0].type == "text"


async def test_tokens_are_counted(
    cluster: RunningCluster, client: anthropic.AsyncAnthropic
) -> None:
    counted = await client.messages.count_tokens(model=cluster.model, messages=QUESTION)
    answer = await client.messages.create(model=cluster.model, messages=QUESTION, max_tokens=1)
    cached = answer.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == answer.usage.input_tokens + cached


async def test_errors_are_the_packages_own(
    cluster: RunningCluster, client: anthropic.AsyncAnthropic
) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(model="other", messages=QUESTION, max_tokens=1)
    assert missing.value.type == "not_found_error"
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        await client.messages.create(model=cluster.model, messages=QUESTION, max_tokens=0)
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type"):
        await client.messages.create(
            model=cluster.model, messages=[{"role": "user", "content": [image]}], max_tokens=1
        )
