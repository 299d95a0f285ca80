"""The Responses API through the whole cluster, by the ``openai`` package."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.integration.conftest import on
from tests.integration.running_cluster import RunningCluster

pytestmark = on("int8-1p1d")

QUESTION = "What is the capital of Japan?"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Pet(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    kind: Literal["cat", "dog"]
    age: int = pydantic.Field(ge=0, le=30)


@pytest.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{cluster.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def test_create_and_stream(cluster: RunningCluster, client: openai.AsyncOpenAI) -> None:
    fields: Any = {"model": cluster.model, "input": QUESTION, "temperature": 0}
    whole = await client.responses.create(
        **fields,
        max_output_tokens=32,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    assert "Tokyo" in whole.output_text
    assert whole.status == "completed"
    message: Any = whole.output[0]
    logprobs = message.content[0].logprobs
    assert b"".join(bytes(one.bytes) for one in logprobs).decode() == whole.output_text
    assert all(len(one.top_logprobs) == 2 for one in logprobs)
    async with client.responses.stream(**fields, max_output_tokens=32) as stream:
        text = "".join(
            [event.delta async for event in stream if event.type == "response.output_text.delta"]
        )
        streamed = await stream.get_final_response()
    assert text == streamed.output_text == whole.output_text
    assert streamed.usage is not None
    assert whole.usage is not None
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    short = await client.responses.create(**fields, max_output_tokens=2)
    assert short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"
    assert short.usage is not None
    assert short.usage.output_tokens == 2


async def test_tools_there_and_back(cluster: RunningCluster, client: openai.AsyncOpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]
    fields: Any = {"model": cluster.model, "tools": [WEATHER], "temperature": 0}
    async with client.responses.stream(
        **fields, input=items, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        pieces = [
            event.delta
            async for event in stream
            if event.type == "response.function_call_arguments.delta"
        ]
        answer = await stream.get_final_response()
    (call,) = answer.output
    assert call.type == "function_call"
    assert call.name == "get_weather"
    assert "".join(pieces) == call.arguments
    assert set(json.loads(call.arguments)) == {"city"}
    items += answer.output
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    after = await client.responses.create(
        **fields, input=items, tool_choice="none", max_output_tokens=16
    )
    assert after.output_text


async def test_a_schema(cluster: RunningCluster, client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.parse(
        model=cluster.model, input="Describe a pet.", text_format=Pet, temperature=1
    )
    assert isinstance(answer.output_parsed, Pet)


async def test_refusals_are_the_packages_own(
    cluster: RunningCluster, client: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as stored:
        await client.responses.create(model=cluster.model, input=QUESTION, store=True)
    assert (stored.value.code, stored.value.param) == ("unsupported_parameter", "store")
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="other", input=QUESTION)


async def test_a_client_that_stops_reading_early(
    cluster: RunningCluster, client: openai.AsyncOpenAI
) -> None:
    stream = await client.responses.create(model=cluster.model, input=QUESTION, stream=True)
    async with stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
    cluster.wait_idle()
