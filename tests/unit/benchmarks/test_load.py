"""The load generator against a server whose stream is known."""

import asyncio
import math
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.load import (
    Api,
    LlamaCompletion,
    LoadError,
    LoadResult,
    OpenAICompletions,
    percentile,
    run_load,
)
from benchmarks.table import format_table
from benchmarks.workload import chat_output_lengths, random_prompts


def openai_events(num_tokens: int) -> list[Any]:
    tokens: list[Any] = [{"choices": [{"text": ""}], "usage": None}] * num_tokens
    return [*tokens, {"choices": [], "usage": {"completion_tokens": num_tokens}}]


def llama_events(num_tokens: int) -> list[Any]:
    tokens = [{"content": "", "tokens": [7], "stop": False}] * num_tokens
    return [*tokens, {"content": "", "tokens": [], "stop": True, "tokens_predicted": num_tokens}]


async def load(api: Api, events: list[Any], *, status: int = 200) -> tuple[LoadResult, list[Any]]:
    bodies: list[Any] = []
    open_now = most_open = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal open_now, most_open
        bodies.append(orjson.loads(await request.read()))
        open_now += 1
        most_open = max(most_open, open_now)
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for event in events:
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
            await asyncio.sleep(0)
        open_now -= 1
        return response

    app = web.Application()
    app.router.add_post(api.path, answer)
    async with TestServer(app) as server:
        prompts = random_prompts(6, 5, seed=0)
        url = str(server.make_url("/"))
        result = await run_load(url, api, prompts, clients=2, num_output=3)
    assert most_open <= 2
    assert sorted(body["prompt"] for body in bodies) == sorted(prompts)
    return result, bodies


@pytest.mark.parametrize(
    ("api", "events"),
    [(OpenAICompletions("m"), openai_events(3)), (LlamaCompletion(), llama_events(3))],
    ids=["openai", "llama"],
)
async def test_every_prompt_is_sent_once_and_counted(api: Api, events: list[Any]) -> None:
    result, _ = await load(api, events)
    assert (result.requests, result.clients) == (6, 2)
    assert result.total_tokens_per_s == pytest.approx(result.output_tokens_per_s * (3 + 5) / 3)
    assert 0 < result.ttft_p50_ms <= result.ttft_p99_ms
    assert math.isnan(result.prompt_tokens_per_s)


@pytest.mark.parametrize(
    ("events", "status"),
    [
        (openai_events(2), 200),
        (openai_events(3), 503),
        ([*openai_events(3)[:2], {"error": {"message": "worker lost"}}], 200),
        (openai_events(3)[:3], 200),
    ],
    ids=["too few tokens", "refused", "error in the stream", "cut off"],
)
async def test_a_wrong_answer_fails_the_run(events: list[Any], status: int) -> None:
    with pytest.raises(LoadError):
        await load(OpenAICompletions("m"), events, status=status)


def test_percentiles_are_numpys() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0, 3.0], 99) == pytest.approx(2.98)
    assert math.isnan(percentile([], 50))


def test_prompts_share_no_prefix_and_depend_on_the_seed_alone() -> None:
    prompts = random_prompts(50, 8, seed=(1, 2))
    assert len({prompt[0] for prompt in prompts}) > 45
    assert prompts == random_prompts(50, 8, seed=(1, 2))
    assert prompts != random_prompts(50, 8, seed=(1, 3))


def test_the_trace_is_scaled_and_bounded() -> None:
    assert chat_output_lengths(3, 1.0) == [44, 142, 181]
    assert chat_output_lengths(2, 0.001) == [1, 1]
    with pytest.raises(ValueError, match="holds 1020 requests, not 1021"):
        chat_output_lengths(1021, 1.0)


def test_a_table_is_aligned() -> None:
    lines = format_table(("a", "long heading"), [[1, 1234.5], ["x", float("nan")]]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2] == "| 1 |         1234 |"
