"""Spans of one HTTP request: the request itself, its tokenising, and every attempt."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from gateway.observe.timeline import Arrival
from mesh.errors import PdmeshError
from mesh.telemetry.tracing import Attributes, OpenSpan, Tracing


class RequestTrace:
    """Owns the request's span; workers hang theirs under those of the attempts."""

    def __init__(self, tracing: Tracing, path: str, traceparent: str, arrived_s: float) -> None:
        """Begin the request's span.

        Args:
            tracing: Exports it.
            path: Of the request.
            traceparent: What the client sent; anything.
            arrived_s: ``time.monotonic()``.
        """
        self._tracing = tracing
        self._root = tracing.start(
            f"POST {path}",
            parent=traceparent,
            start_s=arrived_s,
            attributes={"http.request.method": "POST", "url.path": path},
            kind="server",
        )
        self._attempts: dict[str, OpenSpan] = {}
        self._attributes: dict[str, str | int | float | bool] = {}

    def tokenised(self, arrival: Arrival, num_tokens: int) -> None:
        """The prompts are tokens."""
        self._tracing.span(
            "tokenise",
            parent=self._root.traceparent,
            start_s=arrival.decoded_s,
            end_s=arrival.tokenised_s,
            attributes={"gen_ai.usage.prompt_tokens": num_tokens},
        )

    def on_attempt(self, request_id: str, workers: tuple[str, ...], number: int) -> str:
        """An attempt is sent now: the context for both of its legs."""
        attributes: dict[str, str | int] = {
            "pdmesh.request_id": request_id,
            "pdmesh.attempt": number,
            "pdmesh.decode_worker": workers[0],
        }
        if len(workers) > 1:
            attributes["pdmesh.prefill_worker"] = workers[1]
        span = self._tracing.start(
            "attempt",
            parent=self._root.traceparent,
            start_s=time.monotonic(),
            attributes=attributes,
        )
        self._attempts[request_id] = span
        return span.traceparent

    def on_attempt_ended(self, request_id: str, error: str = "") -> None:
        """It is over; with ``error`` it failed. Idempotent."""
        span = self._attempts.pop(request_id, None)
        if span is not None:
            span.end(time.monotonic(), error=error)

    def describe(self, attributes: Attributes) -> None:
        """More about the request."""
        self._attributes.update(attributes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """The answer was sent, or there will be none: end every span."""
        failure = ""
        if error is not None:
            failure = error.code if isinstance(error, PdmeshError) else type(error).__name__
        for request_id in list(self._attempts):
            self.on_attempt_ended(request_id, failure)
        self._root.end(time.monotonic(), self._attributes, error=failure)
