"""Speaks the OpenAI API to a gateway under test."""

from __future__ import annotations

import io
import json
from typing import Any

import aiohttp

from tests.unit.gateway.scripted_cluster import ScriptedCluster

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


class Client:
    """Thin: what comes back is what was on the wire."""

    def __init__(self, cluster: ScriptedCluster, session: aiohttp.ClientSession) -> None:
        self.cluster = cluster
        self.session = session

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.cluster.url + path) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        kind = "data" if isinstance(body, bytes | io.BytesIO) else "json"
        url = self.cluster.url + path
        async with self.session.post(url, **{kind: body}, **options) as response:
            return response.status, await response.json()

    async def chat(self, **fields: Any) -> dict[str, Any]:
        status, body = await self.post(CHAT, {"messages": MESSAGES, **fields})
        assert status == 200, body
        return body

    async def complete(self, **fields: Any) -> dict[str, Any]:
        status, body = await self.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 100, **fields})
        assert status == 200, body
        return body

    async def stream(self, path: str, **fields: Any) -> list[bytes]:
        """The data of every event, ``[DONE]`` included."""
        base = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi", "max_tokens": 100}
        body = {**base, "stream": True, **fields}
        async with self.session.post(self.cluster.url + path, json=body) as response:
            text = await response.read()
            assert response.status == 200, text
            assert response.headers["Content-Type"].startswith("text/event-stream")
        assert text.endswith(b"\n\n")
        events = text.removesuffix(b"\n\n").split(b"\n\n")
        assert all(event.startswith(b"data: ") for event in events)
        return [event.removeprefix(b"data: ") for event in events]

    async def stream_json(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """Every event but ``[DONE]``, which must be the last."""
        events = await self.stream(path, **fields)
        assert events[-1] == b"[DONE]"
        return [json.loads(event) for event in events[:-1]]
