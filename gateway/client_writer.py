"""Writes to clients that may read slowly or not at all.

A write waits while the client is behind; a connection that takes no bytes for ``MAX_STALL_S`` is
broken. So nobody holds an answer's memory, or the KV behind it, by not reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from aiohttp import web

from gateway.errors import SlowReader
from gateway.observe.request_metrics import count_failure

MAX_STALL_S = 30.0
"""A client whose connection takes no more bytes for this long is dropped."""

_WRITE_BYTES = 1 << 16
"""Larger bodies are sent in pieces of this size, each within ``MAX_STALL_S``."""


async def open_stream(http_request: web.Request) -> web.StreamResponse:
    """Send the head of a stream of server-sent events."""
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
        }
    )
    await response.prepare(http_request)
    return response


async def write(
    http_request: web.Request, response: web.StreamResponse, data: bytes | bytearray | memoryview
) -> None:
    """Send a part of the body.

    Raises:
        ConnectionError: the client left, or did not read for too long.
    """
    await _bounded(http_request, response.write(data))


async def finish(http_request: web.Request, response: web.StreamResponse) -> None:
    """Send the end of the body; raises as ``write``."""
    await _bounded(http_request, response.write_eof())


async def send_json(http_request: web.Request, body: bytes) -> web.StreamResponse:
    """Answer with ``body``; raises as ``write`` where it is too large for one write."""
    if len(body) <= _WRITE_BYTES:
        return web.Response(body=body, content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = len(body)
    await response.prepare(http_request)
    view = memoryview(body)
    for start in range(0, len(body), _WRITE_BYTES):
        await write(http_request, response, view[start : start + _WRITE_BYTES])
    await finish(http_request, response)
    return response


async def _bounded(http_request: web.Request, sending: Coroutine[Any, Any, None]) -> None:
    transport = http_request.transport
    if transport is None or transport.get_write_buffer_size() == 0:
        await sending  # nothing is waiting to be read: it is not behind
        return
    try:
        async with asyncio.timeout(MAX_STALL_S):
            await sending
    except TimeoutError:
        count_failure(SlowReader.code)
        transport.abort()
        raise ConnectionResetError("the client does not read") from None
