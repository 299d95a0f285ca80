"""Reads an HTTP body, bounded in size and time."""

from __future__ import annotations

import asyncio

from aiohttp import web

from gateway.errors import BodyTimeout, BrokenBody, PayloadTooLarge
from gateway.server_state import ServerState

MAX_BODY_S = 30.0
"""A body that takes longer than this to arrive is given up."""


async def read_body(http_request: web.Request, server: ServerState) -> bytes:
    """Return the whole body.

    Raises:
        PayloadTooLarge: it is over the gateway's limit.
        BodyTimeout: it did not arrive in time; the connection is closed after the answer.
        BrokenBody: it cannot be decoded; the connection is closed, too.
        Overloaded: other clients' bodies take all the room.
    """
    size = server.max_body_bytes
    if http_request.content_length is not None and "Content-Encoding" not in http_request.headers:
        size = min(size, http_request.content_length)
    try:
        with server.receiving(size):
            async with asyncio.timeout(MAX_BODY_S):
                return await http_request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise PayloadTooLarge(f"the body is over {server.max_body_bytes} bytes") from error
    except web.RequestPayloadError as error:
        raise BrokenBody("the body's encoding is broken") from error
    except TimeoutError as error:
        raise BodyTimeout("the body did not arrive in time") from error
