"""Several answers from one prefill, and masks that the workers' samplers keep."""

from __future__ import annotations

import random
from typing import Any

import aiohttp

from tests.integration.conftest import on
from tests.integration.running_cluster import RunningCluster
from tests.integration.test_worker_metrics import scrape

pytestmark = on("int8-1p1d")

_NUM_PROMPT_TOKENS = 40


async def _complete(
    cluster: RunningCluster, session: aiohttp.ClientSession, **fields: Any
) -> dict[str, Any]:
    async with session.post(f"{cluster.url}/v1/completions", json=fields) as response:
        body: dict[str, Any] = await response.json()
        assert response.status == 200, body
    return body


def _prefill_lookups(cluster: RunningCluster) -> float:
    cluster.wait_idle()
    [prefill] = [w for w in cluster.get("/debug/census")["workers"] if w["role"] == "prefill"]
    return scrape(prefill["http_endpoint"])["vllm:prefix_cache_queries_total"]


async def test_three_answers_from_one_prefill(
    cluster: RunningCluster, session: aiohttp.ClientSession
) -> None:
    fields = {
        "prompt": random.Random(3).choices(range(10, 40_000), k=_NUM_PROMPT_TOKENS),
        "seed": 11,
        "max_tokens": 12,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    before = _prefill_lookups(cluster)
    body = await _complete(cluster, session, n=3, **fields)
    assert _prefill_lookups(cluster) - before == _NUM_PROMPT_TOKENS, "the prompt went to P once"
    answers = [tuple(choice["token_ids"]) for choice in body["choices"]]
    assert len(set(answers)) == 3
    assert body["usage"]["prompt_tokens"] == _NUM_PROMPT_TOKENS
    assert body["usage"]["completion_tokens"] == 3 * 12
    again = await _complete(cluster, session, n=3, **fields)
    assert [tuple(choice["token_ids"]) for choice in again["choices"]] == answers
    first = await _complete(cluster, session, **fields)
    assert tuple(first["choices"][0]["token_ids"]) == answers[0], "the first has the seed itself"


async def test_best_of_returns_one_of_what_n_makes(
    cluster: RunningCluster, session: aiohttp.ClientSession
) -> None:
    fields = {"prompt": "The river", "seed": 5, "max_tokens": 8, "ignore_eos": True}
    made = await _complete(cluster, session, n=4, logprobs=0, **fields)
    likeliest = max(made["choices"], key=lambda choice: sum(choice["logprobs"]["token_logprobs"]))
    [best] = (await _complete(cluster, session, best_of=4, **fields))["choices"]
    assert best["text"] == likeliest["text"]
    assert best["logprobs"] is None


async def test_masks(cluster: RunningCluster, session: aiohttp.ClientSession) -> None:
    fields: dict[str, Any] = {"prompt": "Once upon a", "temperature": 0, "max_tokens": 12}
    free = (await _complete(cluster, session, **fields))["choices"][0]["text"]
    assert "time" in free
    without = await _complete(cluster, session, bad_words=["time"], **fields)
    assert "time" not in without["choices"][0]["text"]
    allowed = [100, 200, 300]
    body = await _complete(
        cluster, session, allowed_token_ids=allowed, return_token_ids=True, **fields
    )
    assert len(body["choices"][0]["token_ids"]) == 12
    assert set(body["choices"][0]["token_ids"]) <= set(allowed)
