"""JSON schemas, grammars and tool calls through the whole cluster, by the ``openai`` package."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator
from typing import Any, Literal

import aiohttp
import openai
import pydantic
import pytest
from pydantic import BaseModel, Field, TypeAdapter

from tests.integration.conftest import on
from tests.integration.running_cluster import RunningCluster, ask

pytestmark = on("int8-1p1d")

NUM_RUNS = 200
NUM_AT_ONCE = 16

MESSAGES: list[Any] = [{"role": "user", "content": "Describe a person from Paris in JSON."}]


class _Strict(BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class Person(_Strict):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)
    is_student: bool


class Pet(_Strict):
    kind: Literal["cat", "dog", "bird"]
    age: int | None = Field(ge=0, le=30)


class Owner(_Strict):
    id: str = Field(pattern=r"^[A-Z]-[0-9]{2}$")
    pets: list[Pet] = Field(max_length=1)


class Day(_Strict):
    day: Literal["Monday", "Friday"]
    hours: list[int] = Field(max_length=2)


TYPES: tuple[type[BaseModel], ...] = (Person, Owner, Day)

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "get_time"}}


@pytest.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{cluster.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


def response_format(kind: type[BaseModel]) -> Any:
    schema = kind.model_json_schema()
    hours = schema["properties"].get("hours")
    if hours:  # bounded, so that every answer ends
        hours["items"] |= {"minimum": 0, "maximum": 24}
    json_schema = {"name": kind.__name__, "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": json_schema}


async def test_every_one_of_200_answers_is_valid(
    cluster: RunningCluster, client: openai.AsyncOpenAI
) -> None:
    places = asyncio.Semaphore(NUM_AT_ONCE)

    async def run(seed: int) -> str:
        kind = TYPES[seed % len(TYPES)]
        async with places:
            answer = await client.chat.completions.create(
                model=cluster.model,
                messages=MESSAGES,
                response_format=response_format(kind),
                temperature=1.0,
                seed=seed,
                max_tokens=100,
            )
        (choice,) = answer.choices
        assert choice.finish_reason == "stop", choice
        kind.model_validate_json(choice.message.content or "")
        return choice.message.content or ""

    texts = await asyncio.gather(*map(run, range(NUM_RUNS)))
    assert len(set(texts)) > NUM_RUNS / 2, "a grammar leaves a choice"
    cluster.wait_idle()


async def test_the_package_parses_into_a_model(
    cluster: RunningCluster, client: openai.AsyncOpenAI
) -> None:
    answer = await client.chat.completions.parse(
        model=cluster.model, messages=MESSAGES, response_format=Person, temperature=0
    )
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person)
    async with client.chat.completions.stream(
        model=cluster.model, messages=MESSAGES, response_format=Person, temperature=0
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == person


async def test_samples_of_one_prompt_follow_the_schema_each(
    cluster: RunningCluster, client: openai.AsyncOpenAI
) -> None:
    asked = {
        "model": cluster.model, "messages": MESSAGES, "response_format": response_format(Person),
        "n": 4, "seed": 3, "max_tokens": 100,
    }  # fmt: skip
    first, again = [await client.chat.completions.create(**asked) for _ in range(2)]
    texts = [choice.message.content or "" for choice in first.choices]
    assert [Person.model_validate_json(text) for text in texts]
    assert len(set(texts)) > 1
    assert texts == [choice.message.content for choice in again.choices]


async def test_regex_choice_and_grammar(
    cluster: RunningCluster, session: aiohttp.ClientSession
) -> None:
    for fields, pattern in (
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}, "[0-9]{3}-[a-f]{2}"),
        ({"guided_choice": ["Paris", "Rome", "Köln 😀"]}, "Paris|Rome|Köln 😀"),
        ({"guided_grammar": 'root ::= "a" ("b" | "c"){2,4} "."'}, r"a[bc]{2,4}\."),
    ):
        for seed in range(3):
            answer = await ask(cluster, session, "Say: ", temperature=1, seed=seed, **fields)
            assert re.fullmatch(pattern, answer.text)
            assert answer.finish_reason == "stop"


async def test_required_calls_stream_and_are_valid(
    cluster: RunningCluster, client: openai.AsyncOpenAI
) -> None:
    for seed in range(2):
        asked: dict[str, Any] = {
            "model": cluster.model, "messages": MESSAGES, "tools": [WEATHER], "seed": seed,
            "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100,
        }  # fmt: skip
        whole = (await client.chat.completions.create(**asked)).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        (call,) = whole.message.tool_calls or ()
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == {"city", "unit"}
        assert arguments["unit"] in ("celsius", "fahrenheit")
        chunks = [c async for c in await client.chat.completions.create(**asked, stream=True)]
        deltas = list(itertools.chain(*(c.choices[0].delta.tool_calls or () for c in chunks)))
        assert deltas[0].function.name == "get_weather"
        assert deltas[0].id
        assert len(deltas) > 3
        assert "".join(d.function.arguments for d in deltas) == call.function.arguments
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_a_named_tool_is_called_and_its_result_is_taken(
    cluster: RunningCluster, client: openai.AsyncOpenAI
) -> None:
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    async with client.chat.completions.stream(
        model=cluster.model, messages=MESSAGES, tools=[CLOCK, WEATHER], tool_choice=choice,
        temperature=0, max_tokens=200, parallel_tool_calls=False,
    ) as stream:  # fmt: skip
        kinds = {event.type async for event in stream}
        final = (await stream.get_final_completion()).choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    (call,) = final.message.tool_calls or ()
    TypeAdapter(dict[str, str]).validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 25 degrees"}
    answer = await client.chat.completions.create(
        model=cluster.model,
        messages=[*MESSAGES, final.message.to_dict(), result],  # type: ignore[list-item]
        tools=[CLOCK, WEATHER],
        temperature=0,
        max_tokens=20,
    )
    assert answer.choices[0].message.content


async def test_a_broken_schema_is_told_by_name(
    cluster: RunningCluster, client: openai.AsyncOpenAI
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "number", "not": {"const": 1}}}}
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model=cluster.model, messages=MESSAGES, response_format=wrong
        )
    assert caught.value.param == "response_format.json_schema.schema"
    assert "not" in caught.value.message
