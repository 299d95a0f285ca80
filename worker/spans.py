"""Spans of a worker's legs, made in its control loop from what passes through it.

prefill worker    queue ─ prefill ─ kv transfer
decode worker     kv receive ─ decode queue ─ decode
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from mesh.config import WorkerConfig
from mesh.messages import DecodeRequest, PrefillRequest, RequestFailed, TokenOutput
from mesh.telemetry.log_format import about
from mesh.telemetry.tracing import Attributes, Tracing, open_tracing

MAX_OPEN = 65_536
"""Legs remembered; the oldest are forgotten."""


@dataclass(slots=True)
class _Leg:
    traceparent: str
    request_id: str
    num_tokens: int
    decode_from_s: float = 0.0
    transfer_from_s: float = 0.0
    num_outputs: int = 0


class WorkerSpans:
    """Knows the legs that are traced; all others cost one look-up."""

    def __init__(self, tracing: Tracing, worker_id: str) -> None:
        self._tracing = tracing
        self._worker_id = worker_id
        self._legs: OrderedDict[str, _Leg] = OrderedDict()

    def on_request(self, request: PrefillRequest | DecodeRequest) -> None:
        """A gateway sent a leg."""
        if request.traceparent:
            leg = _Leg(request.traceparent, request.request_id, len(request.token_ids))
            self._legs[request.transfer_id] = leg
            if len(self._legs) > MAX_OPEN:
                self._legs.popitem(last=False)

    def on_outputs(self, outputs: Sequence[TokenOutput], *, is_prefill: bool) -> None:
        """A step made these tokens."""
        now_s = time.monotonic()
        for output in outputs:
            leg = self._legs.get(output.transfer_id)
            if leg is None:
                continue
            leg.num_outputs += len(output.token_ids)
            timing = output.timing
            if timing is not None:
                begun_s = now_s - timing.compute_s
                self._span(
                    leg, "queue" if is_prefill else "decode queue", begun_s - timing.queue_s,
                    begun_s, {},
                )  # fmt: skip
                leg.decode_from_s = begun_s
                if is_prefill:
                    tokens = {
                        "pdmesh.num_tokens": leg.num_tokens,
                        "pdmesh.num_cached_tokens": output.num_cached_tokens,
                    }
                    self._span(leg, "prefill", begun_s, now_s, tokens)
            if output.finish_reason is not None and not is_prefill:
                tokens = {"pdmesh.num_tokens": leg.num_outputs}
                self._span(leg, "decode", leg.decode_from_s, now_s, tokens)
                del self._legs[output.transfer_id]

    def on_transfer_begun(self, transfer_id: str) -> None:
        """KV may move from now on: P has some to send, or D has granted blocks."""
        leg = self._legs.get(transfer_id)
        if leg is not None and not leg.transfer_from_s:
            leg.transfer_from_s = time.monotonic()

    def on_transfer_done(self, name: str, transfer_id: str, attributes: Attributes) -> None:
        """It went well."""
        leg = self._legs.get(transfer_id)
        if leg is not None and leg.transfer_from_s:
            self._span(leg, name, leg.transfer_from_s, time.monotonic(), attributes)

    def on_failed(self, transfer_id: str, code: str) -> None:
        """The leg is over without its last token."""
        leg = self._legs.pop(transfer_id, None)
        if leg is not None:
            now_s = time.monotonic()
            self._span(leg, "failed", now_s, now_s, {"pdmesh.code": code}, error=code)

    def forget(self, transfer_id: str) -> None:
        """Nothing more comes of this leg."""
        self._legs.pop(transfer_id, None)

    def close(self) -> None:
        """Export what is left; blocks for at most two seconds."""
        self._tracing.close()

    def _span(
        self, leg: _Leg, name: str, start_s: float, end_s: float, attributes: Attributes,
        *, error: str = "",
    ) -> None:  # fmt: skip
        named = {"pdmesh.request_id": leg.request_id, "pdmesh.worker": self._worker_id}
        self._tracing.span(
            name,
            parent=leg.traceparent,
            start_s=start_s,
            end_s=end_s,
            attributes={**named, **attributes},
            error=error,
        )


def open_spans(config: WorkerConfig) -> WorkerSpans | None:
    """Those of a worker; None where it exports none.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    tracing = open_tracing(config.otlp_endpoint, config.role, config.worker_id)
    return None if tracing is None else WorkerSpans(tracing, config.worker_id)


def log_leg(logger: logging.Logger, request: PrefillRequest | DecodeRequest) -> None:
    """A gateway sent a leg."""
    if logger.isEnabledFor(logging.DEBUG):
        ids = about(request.request_id, transfer_id=request.transfer_id)
        logger.debug("leg received tokens=%d", len(request.token_ids), extra=ids)


def log_failure(logger: logging.Logger, failed: RequestFailed) -> None:
    """A gateway is told that a leg failed."""
    ids = about(failed.request_id, transfer_id=failed.transfer_id, code=failed.code)
    logger.info("leg failed %s", failed.message, extra=ids)
