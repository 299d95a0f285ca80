"""``litellm`` and ``langchain-openai``, which put other APIs before the one that they call."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any, Literal

import openai
import pydantic
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from tests.integration.conftest import on
from tests.integration.running_cluster import RunningCluster

pytestmark = on("int8-1p1d")

QUESTION: Any = [{"role": "user", "content": "What is the capital of Japan?"}]
PARAMETERS: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather.", "parameters": PARAMETERS},
}


class Pet(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    kind: Literal["cat", "dog"]
    age: int = pydantic.Field(ge=0, le=30)


@pytest.fixture
async def litellm(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ModuleType]:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the internet
    import litellm

    yield litellm
    # It keeps connections for later event loops, which there are none of.
    await litellm.close_litellm_async_clients()
    litellm.in_memory_llm_clients_cache.flush_cache()


@pytest.fixture
async def http() -> AsyncIterator[Any]:
    """Connections of langchain, which would keep its own."""
    async with openai.DefaultAsyncHttpxClient() as client:
        yield client


def fields(cluster: RunningCluster, provider: str) -> dict[str, Any]:
    base = cluster.url if provider == "anthropic" else f"{cluster.url}/v1"
    return {
        "model": f"{provider}/{cluster.model}",
        "api_base": base,
        "api_key": "none",
        "messages": QUESTION,
        "max_tokens": 32,
        "temperature": 0,
        "num_retries": 0,
    }


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
async def test_litellm(cluster: RunningCluster, litellm: ModuleType, provider: str) -> None:
    base = fields(cluster, provider)
    whole = await litellm.acompletion(**base)
    text = whole.choices[0].message.content
    assert "Tokyo" in text
    stream = await litellm.acompletion(**base, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == "stop"
    called = await litellm.acompletion(**base, tools=[WEATHER], tool_choice="required")
    (call,) = called.choices[0].message.tool_calls[:1]
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}


async def test_litellm_schema_and_logprobs(cluster: RunningCluster, litellm: ModuleType) -> None:
    base = fields(cluster, "openai")
    answer = await litellm.acompletion(**base, response_format=Pet)
    Pet.model_validate_json(answer.choices[0].message.content)
    answer = await litellm.acompletion(**base | {"max_tokens": 3}, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert "".join(token.token for token in content) == answer.choices[0].message.content
    assert all(len(token.top_logprobs) == 2 for token in content)


def langchain(cluster: RunningCluster, http: Any, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        http_async_client=http,
        model=cluster.model,
        base_url=f"{cluster.url}/v1",
        api_key=pydantic.SecretStr("none"),
        temperature=0,
        max_retries=0,
        **more,
    )


@pytest.mark.parametrize("uses_responses", [False, True])
async def test_langchain(cluster: RunningCluster, http: Any, uses_responses: bool) -> None:
    model = langchain(cluster, http, use_responses_api=uses_responses, max_completion_tokens=32)
    question = HumanMessage("What is the capital of Japan?")
    whole = await model.ainvoke([question])
    assert "Tokyo" in whole.text
    assert whole.usage_metadata is not None
    chunks = [chunk async for chunk in model.astream([question])]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert len(chunks) > 4
    tools = model.bind_tools([WEATHER], tool_choice="required", parallel_tool_calls=False)
    called = await tools.ainvoke([HumanMessage("Weather in Rome?")])
    assert isinstance(called, AIMessage)
    (call,) = called.tool_calls
    assert call["name"] == "get_weather"
    assert set(call["args"]) == {"city"}
    after = await model.ainvoke(
        [HumanMessage("Weather in Rome?"), called, ToolMessage("sunny", tool_call_id=call["id"])]
    )
    assert after.text


async def test_langchain_schema_and_logprobs(cluster: RunningCluster, http: Any) -> None:
    shaped = langchain(cluster, http).with_structured_output(Pet, method="json_schema")
    assert isinstance(await shaped.ainvoke("Describe a pet."), Pet)
    model = langchain(cluster, http, max_completion_tokens=3, logprobs=True, top_logprobs=2)
    answer = await model.ainvoke("Hello")
    content = answer.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == answer.text
