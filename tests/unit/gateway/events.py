"""Named server-sent events of the Responses and the Messages API."""

from __future__ import annotations

import json
from typing import Any

from tests.unit.gateway.client import Client

Event = dict[str, Any]


async def stream_events(client: Client, path: str, body: Event) -> list[Event]:
    """The data of every event; its name must be the data's type."""
    url = client.cluster.url + path
    async with client.session.post(url, json={**body, "stream": True}) as response:
        text = await response.read()
        assert response.status == 200, text
        assert response.headers["Content-Type"].startswith("text/event-stream")
    assert text.endswith(b"\n\n")
    events = []
    for event in text.removesuffix(b"\n\n").split(b"\n\n"):
        name, data = event.split(b"\n")
        events.append(json.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + events[-1]["type"].encode()
    return events


def kinds(events: list[Event]) -> list[str]:
    """Types, those that repeat one after the other once."""
    found: list[str] = []
    for event in events:
        if not found or found[-1] != event["type"]:
            found.append(event["type"])
    return found
