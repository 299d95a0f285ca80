"""Prompts that end inside a character, through the real handlers."""

from __future__ import annotations

import pytest

from tests.unit.gateway.client import CHAT, COMPLETIONS, Client
from tests.unit.gateway.scripted_cluster import Script, ScriptedCluster

TEXT = "aé日😀𝄞e\u0301ह"


@pytest.fixture
def byte_ids(cluster: ScriptedCluster) -> list[int]:
    """The token of every single byte of TEXT."""
    pieces = cluster.model.tokenizer.pieces
    by_bytes = {piece: token_id for token_id, piece in reversed(list(enumerate(pieces)))}
    return [by_bytes[bytes([value])] for value in TEXT.encode()]


@pytest.fixture
async def ready(client: Client, cluster: ScriptedCluster) -> Client:
    await cluster.pair(Script())
    await cluster.show_all()
    return client


async def test_a_prompt_may_end_at_any_byte(ready: Client, byte_ids: list[int]) -> None:
    data = TEXT.encode()
    for end in range(1, len(byte_ids)):
        for worker in ready.cluster.workers:
            worker.script.answer = byte_ids[end:]
        fields = {"prompt": byte_ids[:end], "max_tokens": len(byte_ids) - end}
        complete = len(data[:end].decode("utf-8", "ignore"))
        whole = await ready.complete(**fields)
        assert whole["choices"][0]["text"] == TEXT[complete:]
        chunks = await ready.stream_json(COMPLETIONS, **fields)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT[complete:]
        echoed = await ready.stream_json(COMPLETIONS, echo=True, **fields)
        assert "".join(chunk["choices"][0]["text"] for chunk in echoed) == TEXT


async def test_a_continued_message_goes_on_after_any_character(
    ready: Client, script: Script
) -> None:
    for worker in ready.cluster.workers:
        worker.script.answer = script.answer
    tokenizer = ready.cluster.model.tokenizer
    for end in range(1, len(TEXT) + 1):
        begun = {"role": "assistant", "content": TEXT[:end]}
        fields = {
            "messages": [{"role": "user", "content": "hi"}, begun],
            "continue_final_message": True,
        }
        chunks = await ready.stream_json(CHAT, **fields)
        shown = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
        assert shown == "Hello wörld 日本 😀 yes"
        sent = ready.cluster.workers[0].seen.requests[-1].token_ids
        assert tokenizer.decode(sent).endswith(TEXT[:end])
