"""Requests as ``vllm bench serve`` sends them: the extra fields are accepted and right."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp

from tests.integration.conftest import on
from tests.integration.running_cluster import RunningCluster, joined, stream

pytestmark = on("int8-1p1d")

_INPUT_TOKENS = 64
_OUTPUT_TOKENS = 24
_END_OF_TURN = 2


def _completion_fields() -> dict[str, Any]:
    """As its ``openai`` backend (endpoint /v1/completions)."""
    return {
        "repetition_penalty": 1.0,
        "max_tokens": _OUTPUT_TOKENS,
        "logprobs": None,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def _chat_fields() -> dict[str, Any]:
    """As its ``openai-chat`` backend."""
    return {
        "max_completion_tokens": _OUTPUT_TOKENS,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "repetition_penalty": 1.0,
        "logprobs": None,
    }


def _check(events: list[dict[str, Any]], num_prompt_tokens: int) -> None:
    *tokens, last = events
    assert len(tokens) == _OUTPUT_TOKENS, "one event per token, and as many as were asked for"
    assert all(len(event["choices"][0]["token_ids"]) == 1 for event in tokens)
    assert all(event["usage"] is None for event in tokens)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == num_prompt_tokens
    assert last["usage"]["completion_tokens"] == _OUTPUT_TOKENS
    assert last["usage"]["total_tokens"] == num_prompt_tokens + _OUTPUT_TOKENS
    assert joined(events).finish_reason == "length"


async def test_completions_from_16_clients(
    cluster: RunningCluster, session: aiohttp.ClientSession
) -> None:
    async def one(index: int) -> None:
        prompt = random.Random(index).choices(range(10, 40_000), k=_INPUT_TOKENS)
        headers = {"x-request-id": f"bench-{index}", "Authorization": "Bearer none"}
        fields = {**_completion_fields(), "model": cluster.model, "temperature": 0.0}
        events = [e async for e in stream(cluster, session, prompt, headers, **fields)]
        _check(events, _INPUT_TOKENS)

    await asyncio.gather(*(one(index) for index in range(16)))
    cluster.wait_idle()


async def test_chat_with_content_parts(
    cluster: RunningCluster, session: aiohttp.ClientSession
) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What is the capital of Japan?"}]}
    ]
    events = [e async for e in stream(cluster, session, messages, **_chat_fields())]
    _check(events, len(joined(events).prompt_ids))
    # The end-of-turn token is ignored, not masked: the answer goes on after it.
    assert _END_OF_TURN in joined(events).token_ids[:-1]


async def test_the_request_id_comes_back(
    cluster: RunningCluster, session: aiohttp.ClientSession
) -> None:
    for streamed in (False, True):
        async with session.post(
            f"{cluster.url}/v1/completions",
            json={"prompt": "Hi", "max_tokens": 2, "stream": streamed},
            headers={"x-request-id": "bench-17"},
        ) as response:
            await response.read()
            assert response.headers["x-request-id"] == "bench-17"


async def test_repetition_penalty_is_right(
    cluster: RunningCluster, session: aiohttp.ClientSession
) -> None:
    """A penalty that no repeated token survives: prompt and output tokens never come again."""
    prompt = list(range(1000, 1040))
    fields = {**_completion_fields(), "repetition_penalty": 10.0}
    answer = joined([e async for e in stream(cluster, session, prompt, **fields)])
    assert len(set(answer.token_ids)) == _OUTPUT_TOKENS
    assert not set(answer.token_ids) & set(prompt)
