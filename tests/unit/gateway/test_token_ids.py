"""``return_token_ids``: the ids behind the text, where vLLM puts them."""

from __future__ import annotations

import pytest

from gateway.prompts.served_model import ServedModel
from tests.unit.gateway.client import CHAT, COMPLETIONS, Client
from tests.unit.gateway.scripted_cluster import Script, ScriptedCluster


@pytest.fixture(autouse=True)
async def pair(cluster: ScriptedCluster, script: Script) -> None:
    await cluster.pair(script)
    await cluster.show_all()


async def test_ids_of_a_whole_completion(client: Client, script: Script) -> None:
    body = await client.complete(prompt=[[5, 6], [7]], return_token_ids=True)
    for choice, prompt in zip(body["choices"], ([5, 6], [7]), strict=True):
        assert choice["prompt_token_ids"] == prompt
        assert choice["token_ids"] == script.answer  # the token that ended it included
        assert choice["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 2 * len(script.answer)


async def test_ids_of_a_completion_stream(client: Client, script: Script) -> None:
    events = await client.stream_json(COMPLETIONS, prompt=[5, 6], return_token_ids=True)
    choices = [event["choices"][0] for event in events]
    assert [choice["token_ids"] for choice in choices] == [[id_] for id_ in script.answer]
    assert choices[0]["prompt_token_ids"] == [5, 6]
    assert not any("prompt_token_ids" in choice for choice in choices[1:])


async def test_ids_of_a_chat(client: Client, script: Script, model: ServedModel) -> None:
    body = await client.chat(return_token_ids=True)
    events = await client.stream_json(CHAT, return_token_ids=True)
    assert body["choices"][0]["token_ids"] == script.answer
    assert [event["choices"][0]["token_ids"] for event in events] == [[i] for i in script.answer]
    assert events[0]["prompt_token_ids"] == body["prompt_token_ids"]
    assert len(body["prompt_token_ids"]) == body["usage"]["prompt_tokens"]
    assert model.tokenizer.decode(body["prompt_token_ids"]).endswith("hi\nassistant\n")
    assert not any("prompt_token_ids" in event for event in events[1:])


async def test_no_ids_without_asking(client: Client) -> None:
    body = await client.complete()
    assert not {"token_ids", "prompt_token_ids"} & body["choices"][0].keys()
