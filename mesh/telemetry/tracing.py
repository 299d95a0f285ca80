"""Spans for an OpenTelemetry collector (OTLP over HTTP).

Without an endpoint ``open_tracing`` returns None: nothing is imported here, and callers that hold
None do nothing. Times are ``time.monotonic()`` of this process, as everywhere; they become
wall clock where a span is made. Context travels as W3C ``traceparent`` text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from mesh.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import Span

MAX_TRACEPARENT_CHARS = 64
"""Longer ones are no W3C trace context of a version that is known."""

_EXPORT_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 2.0

Attributes = Mapping[str, str | int | float | bool]
Kind = Literal["server", "internal"]


class OpenSpan:
    """A span that has begun; ``end`` it exactly once."""

    def __init__(self, span: Span, traceparent: str) -> None:
        self._span = span
        self.traceparent = traceparent
        """Context for its children, here and in other processes."""

    def end(self, end_s: float, attributes: Attributes | None = None, *, error: str = "") -> None:
        """Hand it to the exporter; with ``error`` its status is an error."""
        if attributes:
            self._span.set_attributes(dict(attributes))
        if error:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(wall_ns(end_s))


class _Provider(Protocol):
    def shutdown(self) -> None: ...


class Tracing:
    """Makes spans and exports them from a thread of its own; what the queue can't hold is lost."""

    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        """Import OpenTelemetry and start the exporter.

        Args:
            endpoint: ``http://host:port`` of a collector; spans go to its ``/v1/traces``.
            service: ``service.name``.
            instance: ``service.instance.id``.

        Raises:
            ConfigError: OpenTelemetry is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(f"otlp_endpoint: OpenTelemetry is not installed: {error}") from error
        resource = Resource.create({"service.name": service, "service.instance.id": instance})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        url = endpoint.rstrip("/") + "/v1/traces"
        exporter = OTLPSpanExporter(endpoint=url, timeout=_EXPORT_TIMEOUT_S)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        self._provider: _Provider = provider
        self._tracer = provider.get_tracer("pdmesh")
        self._propagator = TraceContextTextMapPropagator()
        self._kinds: dict[Kind, Any] = {
            "server": SpanKind.SERVER,
            "internal": SpanKind.INTERNAL,
        }

    def start(
        self,
        name: str,
        *,
        parent: str,
        start_s: float,
        attributes: Attributes | None = None,
        kind: Kind = "internal",
    ) -> OpenSpan:
        """Begin a span.

        Args:
            name: What it is.
            parent: ``traceparent`` of its parent; one that is none begins a new trace.
            start_s: When it began.
            attributes: Known so far.
            kind: ``server`` for what a client asked for.
        """
        from opentelemetry.trace import set_span_in_context

        context = self._propagator.extract({"traceparent": parent[:MAX_TRACEPARENT_CHARS]})
        span = self._tracer.start_span(
            name,
            context=context,
            kind=self._kinds[kind],
            attributes=dict(attributes or {}),
            start_time=wall_ns(start_s),
        )
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return OpenSpan(span, carrier.get("traceparent", ""))

    def span(
        self,
        name: str,
        *,
        parent: str,
        start_s: float,
        end_s: float,
        attributes: Attributes | None = None,
        error: str = "",
    ) -> None:
        """Record something that is over."""
        span = self.start(name, parent=parent, start_s=start_s, attributes=attributes)
        span.end(end_s, error=error)

    def close(self) -> None:
        """Export what is left, for at most two seconds."""
        # In a thread: a collector that does not answer must not hold a shutdown up.
        thread = threading.Thread(target=self._provider.shutdown, name="tracing", daemon=True)
        thread.start()
        thread.join(_CLOSE_TIMEOUT_S)


def open_tracing(endpoint: str, role: str, instance: str) -> Tracing | None:
    """Spans of a process; None where there is no endpoint.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    return Tracing(endpoint, f"pdmesh-{role}", instance) if endpoint else None


def wall_ns(monotonic_s: float) -> int:
    """Wall-clock nanoseconds of a moment of this process's monotonic clock."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)
