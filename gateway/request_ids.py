"""The ids by which a request is found: the client's, and ours in every process's log."""

from __future__ import annotations

import re
import uuid

from aiohttp import web

HEADER = "X-Request-Id"
ANSWER_ID = web.RequestKey("answer_id", str)
"""Set once an answer is made: ``request_id`` in logs and traces, up to the choice's number."""

_ACCEPTED = re.compile(r"[\x21-\x7e]{1,128}")


def client_request_id(request: web.Request) -> str:
    """What the client calls its request; "" where it says nothing that can be repeated."""
    given = request.headers.get(HEADER, "")
    return given if _ACCEPTED.fullmatch(given) else ""


async def echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Put the client's id, else ours, into the head of the answer."""
    own = request.get(ANSWER_ID)
    response.headers[HEADER] = client_request_id(request) or own or uuid.uuid4().hex
