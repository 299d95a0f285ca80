"""Errors of the gateway, and the HTTP form of every error.

PdmeshError                (mesh/errors.py)
├── SlowReader             503  the client reads slower than its answer is made
├── PayloadTooLarge        413  the body is over the limit
├── BodyTimeout            408  the body did not arrive in time
├── BrokenBody             400  the body's transfer or content encoding is broken
├── UnknownParameter       400  a field that neither OpenAI's nor vLLM's API has
└── UnsupportedParameter   400  a field that is known and not served
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

from mesh import errors
from mesh.errors import InvalidRequest, Overloaded, PdmeshError

_RETRY_AFTER_S = 1.0

ErrorForm = Callable[[PdmeshError], dict[str, Any]]
"""Writes the body of an error as one of the APIs has it."""


class SlowReader(PdmeshError):
    """The client reads slower than its answer is made; the stream buffer is full."""

    code = "slow_reader"
    http_status = 503


class PayloadTooLarge(InvalidRequest):
    """The HTTP body is over ``max_body_bytes``."""

    code = "payload_too_large"
    http_status = 413


class BodyTimeout(InvalidRequest):
    """The HTTP body did not arrive in time."""

    code = "request_timeout"
    http_status = 408


class BrokenBody(InvalidRequest):
    """The body's transfer or content encoding is broken."""


class UnknownParameter(InvalidRequest):
    """A field that neither OpenAI's nor vLLM's API has."""

    code = "unknown_parameter"


class UnsupportedParameter(InvalidRequest):
    """A field that is known and not served."""

    code = "unsupported_parameter"


class RemoteError(PdmeshError):
    """A worker failed with a code that this gateway does not know."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


def _tree(root: type[PdmeshError]) -> list[type[PdmeshError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


_BY_CODE = {kind.code: kind for kind in reversed(_tree(errors.PdmeshError))}


def error_from_code(code: str, message: str) -> PdmeshError:
    """The error that a worker named by its code."""
    kind = _BY_CODE.get(code)
    return kind(message) if kind is not None else RemoteError(message, code=code)


def error_body(error: PdmeshError) -> dict[str, Any]:
    """OpenAI's error object."""
    if error.http_status == 429:
        kind = "rate_limit_error"
    elif error.http_status == 404:
        kind = "not_found_error"
    elif error.http_status < 500:
        kind = "invalid_request_error"
    else:
        kind = "server_error"
    param = error.param if isinstance(error, InvalidRequest) else None
    return {"error": {"message": str(error), "type": kind, "param": param, "code": error.code}}


def error_response(error: PdmeshError, form: ErrorForm = error_body) -> web.Response:
    """The answer before any byte was sent; ``form`` makes its body."""
    headers = {}
    if error.http_status in (429, 503):
        delay_s = error.retry_after_s if isinstance(error, Overloaded) else _RETRY_AFTER_S
        headers["Retry-After"] = str(max(1, math.ceil(delay_s)))
    return web.Response(
        status=error.http_status,
        body=orjson.dumps(form(error)),
        content_type="application/json",
        headers=headers,
    )
