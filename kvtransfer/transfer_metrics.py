"""Prometheus metrics of outgoing transfers."""

from __future__ import annotations

from kvtransfer.events import SendDone
from mesh import metrics

_BUCKETS_S = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0),
)


class TransferMetrics:
    """Counts what a prefill worker sent."""

    def __init__(self) -> None:
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
