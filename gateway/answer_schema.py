"""Bodies that the gateway answers with, typed for the OpenAPI document: those of no single API.

Answers are written from preformatted bytes (see ``gateway.openai.chunks``) and plain dicts, which
is faster; the tests hold what is sent against these types, field by field.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class AnswerBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Nothing is sent that is not named here."""


class TopLogprob(AnswerBody):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The chosen token."""

    top_logprobs: list[TopLogprob]


class Model(AnswerBody):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(AnswerBody):
    """Answer of GET /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Status(AnswerBody):
    """Answer of /health and /ready."""

    status: Literal["ok", "ready"]


class Census(AnswerBody):
    """Answer of GET /debug/census: what each worker says of itself."""

    workers: list[dict[str, Any]]


class Dashboard(AnswerBody):
    """Answer of GET /debug/dashboard: what the gateway remembers of its last minutes."""

    model: str
    ready: bool
    draining: bool
    open_requests: int
    workers: list[dict[str, Any]]
    uptime_s: float
    slot_s: float
    """Length of a slot of the series."""
    summary: dict[str, Any]
    """Percentiles over the last minute, rates over the last slot."""
    series: dict[str, list[float | None]]
    """One value a slot, oldest first."""
    flow_window_s: float
    flows: list[dict[str, Any]]
    """KV that moved, by pair of workers."""
    requests: list[dict[str, Any]]
    """The latest ones that ended, newest first."""


class ErrorDetails(AnswerBody):
    """What went wrong."""

    message: str
    type: Literal["invalid_request_error", "not_found_error", "rate_limit_error", "server_error"]
    param: str | None
    """The request's field at fault, such as ``messages[0].role``."""
    code: str


class Error(AnswerBody):
    """Every answer that is not a success, and the last event of a stream that failed."""

    error: ErrorDetails
