"""POST /tokenize and /detokenize; they need no workers."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.openai.tokenize_schema import MAX_DETOKENIZED
from tests.unit.gateway.client import CHAT, MESSAGES, Client
from tests.unit.gateway.scripted_cluster import Script, ScriptedCluster

TEXT = "Hello wörld 日本 😀<|im_end|>"


async def test_text_and_back(client: Client, cluster: ScriptedCluster) -> None:
    ids = cluster.model.tokenizer.encode(TEXT, add_special_tokens=True)
    status, body = await client.post("/tokenize", {"prompt": TEXT, "model": cluster.model.name})
    assert status == 200
    assert body == {"count": len(ids), "max_model_len": 8192, "tokens": ids}
    assert await client.post("/detokenize", {"tokens": ids}) == (200, {"prompt": TEXT})
    assert (await client.post("/tokenize", {"prompt": ""}))[1]["tokens"] == []
    assert await client.post("/detokenize", {"tokens": []}) == (200, {"prompt": ""})


async def test_token_strings_are_the_vocabularys(client: Client) -> None:
    _, body = await client.post("/tokenize", {"prompt": "Hi there", "return_token_strs": True})
    assert body["token_strs"] == ["Hi", "Ġthere"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "I"}]},
        {"continue_final_message": True},
    ],
)
async def test_a_conversation_has_the_tokens_of_the_chat_endpoint(
    client: Client, cluster: ScriptedCluster, fields: dict[str, Any]
) -> None:
    await cluster.pair(Script())
    await cluster.show_all()
    body = {"messages": MESSAGES, **fields}
    await client.post(CHAT, {**body, "max_tokens": 1})
    sent = cluster.workers[0].seen.requests[0].token_ids
    _, answer = await client.post("/tokenize", body)
    assert tuple(answer["tokens"]) == sent
    assert answer["count"] == len(sent)


async def test_long_text_is_tokenised_beside_the_event_loop(client: Client) -> None:
    text = "word " * 50_000
    status, body = await client.post("/tokenize", {"prompt": text})
    assert (status, body["count"]) == (200, 50_001)
    status, answer = await client.post("/detokenize", {"tokens": body["tokens"]})
    assert answer["prompt"] == text


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{}]}, 400, "tools[0].type"),
        ("/tokenize", {"messages": MESSAGES, "return_tokens": True}, 400, "return_tokens"),
        ("/tokenize", {"prompt": "a", "model": "gpt-9"}, 404, "model"),
        ("/tokenize", [], 400, None),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [49152]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1] * (MAX_DETOKENIZED + 1)}, 400, "tokens"),
    ],
)
async def test_bad_requests(
    client: Client, path: str, body: Any, status: int, param: str | None
) -> None:
    got, answer = await client.post(path, body)
    assert (got, answer["error"]["param"]) == (status, param)
