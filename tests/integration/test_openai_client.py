"""The ``openai`` package as a client, pointed at the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from tests.integration.conftest import MAX_MODEL_LEN, on
from tests.integration.running_cluster import RunningCluster

_MESSAGES = [{"role": "user", "content": "What is the capital of Japan?"}]

pytestmark = on("int8-1p1d")


@pytest.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{cluster.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def test_chat(cluster: RunningCluster, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=cluster.model, messages=_MESSAGES, temperature=0, max_completion_tokens=32
    )
    assert answer.choices[0].message.role == "assistant"
    assert "Tokyo" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == cluster.model
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_chat_stream(cluster: RunningCluster, client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(
        model=cluster.model, messages=_MESSAGES, temperature=0, max_tokens=32
    )
    stream = await client.chat.completions.create(
        model=cluster.model,
        messages=_MESSAGES,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    *tokens, last = chunks
    assert tokens[0].choices[0].delta.role == "assistant"
    assert tokens[0].choices[0].delta.content, "the role comes with the first token"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in tokens)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in tokens[:-1]] == [None] * (len(tokens) - 1)
    assert tokens[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(tokens)
    assert last.usage == whole.usage.model_copy(
        update={"prompt_tokens_details": last.usage.prompt_tokens_details}
    )
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_client_that_stops_reading_early(
    cluster: RunningCluster, client: openai.AsyncOpenAI
) -> None:
    async with await client.chat.completions.create(
        model=cluster.model, messages=_MESSAGES, max_tokens=400, stream=True
    ) as stream:
        async for _ in stream:
            break
    cluster.wait_idle()


async def test_completion(cluster: RunningCluster, client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(
        model=cluster.model, prompt="Once upon a time", temperature=0, max_tokens=12, logprobs=2
    )
    choice = whole.choices[0]
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs or [])
    stream = await client.completions.create(
        model=cluster.model, prompt="Once upon a time", temperature=0, max_tokens=12, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert len(chunks) == 12
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text


async def test_chat_logprobs(cluster: RunningCluster, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=cluster.model,
        messages=_MESSAGES,
        temperature=0,
        max_tokens=5,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.content or []) == 5
    for token in logprobs.content or []:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob <= 0
    text = b"".join(bytes(token.bytes or []) for token in logprobs.content or []).decode()
    assert text == answer.choices[0].message.content


async def test_several_answers_and_a_seed(
    cluster: RunningCluster, client: openai.AsyncOpenAI
) -> None:
    async def three(seed: int) -> list[str | None]:
        answer = await client.chat.completions.create(
            model=cluster.model,
            messages=[{"role": "user", "content": "Tell me a story."}],
            n=3,
            seed=seed,
            temperature=1.0,
            max_tokens=12,
        )
        return [choice.message.content for choice in answer.choices]

    first = await three(1)
    assert len(set(first)) == 3
    assert await three(1) == first
    assert await three(2) != first


async def test_models(cluster: RunningCluster, client: openai.AsyncOpenAI) -> None:
    models = [model async for model in await client.models.list()]
    assert [model.id for model in models] == [cluster.model]
    assert (await client.models.retrieve(cluster.model)).id == cluster.model
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_errors_are_the_packages_own(
    cluster: RunningCluster, client: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=_MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(model=cluster.model, messages=_MESSAGES, temperature=9)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.completions.create(model=cluster.model, prompt=[5] * (MAX_MODEL_LEN + 1))
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError) as streamed:
        await client.chat.completions.create(
            model=cluster.model,
            messages=[{"role": "user", "content": "word " * MAX_MODEL_LEN}],
            stream=True,
        )
    assert (streamed.value.code, streamed.value.param) == ("context_length_exceeded", "messages")
