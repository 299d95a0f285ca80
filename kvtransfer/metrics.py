"""Prometheus metrics of transfers."""

from __future__ import annotations

from kvtransfer.events import Committed, SendDone
from mesh.telemetry import metrics

_BUCKETS_S = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0),
)


_MAX_CODES = 64
"""Codes may come from a peer: further ones are counted as ``other``."""


class _Failures:
    """Failed transfers of one side, by code."""

    def __init__(self, side: str) -> None:
        self._side = side
        self._codes: set[str] = set()
        self._counter = metrics.counter(
            "pdmesh:kv_transfer_failures",
            "Transfers that ended without their KV.",
            ["side", "code"],
        )

    def count(self, code: str) -> None:
        if len(self._codes) < _MAX_CODES:
            self._codes.add(code)
        label = code if code in self._codes else "other"
        self._counter.labels(side=self._side, code=label).inc()


class TransferMetrics:
    """Counts what a prefill worker sent."""

    def __init__(self) -> None:
        self._failures = _Failures("send")
        self._num_bytes = metrics.counter("pdmesh:kv_transfer_bytes", "KV bytes written.")
        self._hidden = metrics.histogram(
            "pdmesh:kv_transfer_hidden_seconds",
            "Time in which a request's KV moved while its prompt was being computed.",
            buckets=_BUCKETS_S,
        )
        self._exposed = metrics.histogram(
            "pdmesh:kv_transfer_exposed_seconds",
            "Time in which a request's KV moved after its prompt was computed.",
            buckets=_BUCKETS_S,
        )

    def observe(self, done: SendDone) -> None:
        """A transfer ended well; one of nothing (a cached prompt, a first token) is not counted."""
        if done.num_bytes:
            self._num_bytes.inc(done.num_bytes)
            self._hidden.observe(done.hidden_s)
            self._exposed.observe(done.exposed_s)

    def observe_failure(self, code: str) -> None:
        """A transfer failed, was cancelled, or its lease ran out."""
        self._failures.count(code)


class ReceiveMetrics:
    """Counts what a decode worker received."""

    def __init__(self) -> None:
        self._failures = _Failures("receive")
        self._late = metrics.histogram(
            "pdmesh:kv_transfer_late_seconds",
            "From the word that all was sent until it had arrived and was verified.",
            buckets=_BUCKETS_S,
        )

    def observe(self, done: Committed) -> None:
        """A transfer was committed."""
        if not done.done.finished:
            self._late.observe(done.late_s)

    def observe_failure(self, code: str) -> None:
        """A transfer was lost."""
        self._failures.count(code)
