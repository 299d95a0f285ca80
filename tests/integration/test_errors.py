"""Bad requests over HTTP: a 4xx in OpenAI's form that names the field, and nothing held."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.integration.conftest import MAX_MODEL_LEN, on
from tests.integration.running_cluster import RunningCluster

pytestmark = on("int8-1p1d")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_MESSAGES = [{"role": "user", "content": "Hi"}]


async def _refused(
    cluster: RunningCluster, session: aiohttp.ClientSession, path: str, body: bytes
) -> tuple[int, dict[str, Any]]:
    async with session.post(
        cluster.url + path, data=body, headers={"Content-Type": "application/json"}
    ) as response:
        answer = await response.json()
    assert answer.keys() == {"error"}
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert answer["error"]["message"]
    return response.status, answer["error"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b'{"prompt": "a",}'])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_bad_json(
    cluster: RunningCluster, session: aiohttp.ClientSession, path: str, body: bytes
) -> None:
    status, error = await _refused(cluster, session, path, body)
    assert (status, error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "status", "param", "code"),
    [
        (CHAT, {"model": "gpt-4"}, 404, "model", "model_not_found"),
        (COMPLETIONS, {"model": "gpt-4"}, 404, "model", "model_not_found"),
        (CHAT, {"messages": "Hi"}, 400, "messages", "invalid_request"),
        (CHAT, {"messages": []}, 400, "messages", "invalid_request"),
        (CHAT, {"messages": None}, 400, "messages", "invalid_request"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content", None),
        (CHAT, {"messages": [{"role": "boss", "content": ""}]}, 400, "messages[0].role", None),
        (CHAT, {"max_tokens": "many"}, 400, "max_tokens", "invalid_request"),
        (CHAT, {"max_completion_tokens": 0}, 400, "max_completion_tokens", "invalid_request"),
        (CHAT, {"temperature": [1]}, 400, "temperature", "invalid_request"),
        (COMPLETIONS, {"prompt": 5}, 400, "prompt", "invalid_request"),
        (COMPLETIONS, {"prompt": []}, 400, "prompt", "invalid_request"),
        (COMPLETIONS, {"prompt": ""}, 400, "prompt", "invalid_request"),
        (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt", "invalid_request"),
        (COMPLETIONS, {"prompt": [1 << 20]}, 400, "prompt", "invalid_request"),
        (COMPLETIONS, {"prompt": [-1]}, 400, "prompt", "invalid_request"),
        (COMPLETIONS, {"top_p": 0}, 400, "top_p", "invalid_request"),
        (COMPLETIONS, {"stop": ["a"] * 5}, 400, "stop", "invalid_request"),
        (COMPLETIONS, {"logit_bias": {"x": 1}}, 400, "logit_bias", "invalid_request"),
        (
            COMPLETIONS,
            {"prompt": [5] * MAX_MODEL_LEN},
            400,
            "prompt",
            "context_length_exceeded",
        ),
        (
            COMPLETIONS,
            {"prompt": "word " * MAX_MODEL_LEN},
            400,
            "prompt",
            "context_length_exceeded",
        ),
        (
            COMPLETIONS,
            {"prompt": [5] * 100, "max_tokens": MAX_MODEL_LEN - 99},
            400,
            "max_tokens",
            "context_length_exceeded",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "word " * MAX_MODEL_LEN}]},
            400,
            "messages",
            "context_length_exceeded",
        ),
    ],
)
async def test_the_field_is_named(
    cluster: RunningCluster,
    session: aiohttp.ClientSession,
    path: str,
    fields: dict[str, Any],
    status: int,
    param: str,
    code: str | None,
    stream: bool,
) -> None:
    base = {"messages": _MESSAGES} if path == CHAT else {"prompt": "Hi"}
    body = json.dumps({**base, "max_tokens": 4, "stream": stream, **fields}).encode()
    got, error = await _refused(cluster, session, path, body)
    assert (got, error["param"]) == (status, param)
    assert error["code"] == code or code is None
    await asyncio.to_thread(cluster.wait_idle)


async def test_the_longest_request_that_fits(
    cluster: RunningCluster, session: aiohttp.ClientSession
) -> None:
    body = {"prompt": [5] * (MAX_MODEL_LEN - 2), "max_tokens": 2, "ignore_eos": True}
    async with session.post(cluster.url + COMPLETIONS, json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN


async def test_other_paths_and_methods(
    cluster: RunningCluster, session: aiohttp.ClientSession
) -> None:
    async with session.get(cluster.url + CHAT) as response:
        assert response.status == 405
        assert "error" in await response.json()
    status, _ = await _refused(cluster, session, "/v1/nothing", b"{}")
    assert status == 404
