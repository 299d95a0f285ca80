"""Prometheus metrics of requests, under vLLM's names where it has one.

``model_name`` and ``engine``, which every metric of vLLM carries, are added where they are rendered
(``mesh.telemetry.metrics.identify``).
"""

from __future__ import annotations

import time
from typing import Any

from gateway.observe.history import History, RequestRecord
from gateway.observe.timeline import PARTS, Arrival, Timeline
from mesh.leg_timing import LegTiming
from mesh.messages import SamplingParams, SloClass
from mesh.telemetry import metrics
from mesh.telemetry.local_metrics import LocalCounter, LocalHistogram

_SLO_CLASSES: tuple[SloClass, ...] = ("interactive", "batch")

_TTFT = metrics.histogram(
    metrics.TIME_TO_FIRST_TOKEN, "Arrival to first token.", buckets=metrics.TTFT_BUCKETS_S
)
_ITL = LocalHistogram(
    metrics.INTER_TOKEN_LATENCY,
    "Gap between output tokens.",
    buckets=metrics.ITL_BUCKETS_S,
    registry=metrics.REGISTRY,
)
_TPOT = metrics.histogram(
    metrics.TIME_PER_OUTPUT_TOKEN,
    "Mean gap between the output tokens of a request.",
    buckets=metrics.ITL_BUCKETS_S,
)
_E2E = metrics.histogram(
    metrics.E2E_LATENCY, "Arrival to last token.", buckets=metrics.LATENCY_BUCKETS_S
)
_QUEUE = metrics.histogram(
    metrics.REQUEST_QUEUE_TIME,
    "Received by a prefill worker until computed.",
    buckets=metrics.LATENCY_BUCKETS_S,
)
_PREFILL = metrics.histogram(
    metrics.REQUEST_PREFILL_TIME, "Computing the prompt.", buckets=metrics.LATENCY_BUCKETS_S
)
_DECODE = metrics.histogram(
    metrics.REQUEST_DECODE_TIME, "First to last token.", buckets=metrics.LATENCY_BUCKETS_S
)
_INFERENCE = metrics.histogram(
    metrics.REQUEST_INFERENCE_TIME,
    "Prompt taken up to last token.",
    buckets=metrics.LATENCY_BUCKETS_S,
)
_PROMPT_TOKENS = metrics.counter(metrics.PROMPT_TOKENS, "Prompt tokens computed or found cached.")
_GENERATION_TOKENS = LocalCounter(
    metrics.GENERATION_TOKENS, "Output tokens.", registry=metrics.REGISTRY
)
_REQUEST_PROMPT_TOKENS = metrics.histogram(
    metrics.REQUEST_PROMPT_TOKENS, "Prompt tokens a request.", buckets=metrics.TOKEN_COUNT_BUCKETS
)
_REQUEST_GENERATION_TOKENS = metrics.histogram(
    metrics.REQUEST_GENERATION_TOKENS,
    "Output tokens a request.",
    buckets=metrics.TOKEN_COUNT_BUCKETS,
)
_MAX_TOKENS = metrics.histogram(
    metrics.REQUEST_PARAMS_MAX_TOKENS,
    "Output tokens allowed to a request.",
    buckets=metrics.TOKEN_COUNT_BUCKETS,
)
_SUCCESS = metrics.counter(metrics.REQUEST_SUCCESS, "Finished requests.", ["finished_reason"])
_FAILED = metrics.counter("pdmesh:gateway_requests_failed", "Requests that failed.", ["code"])

_CLASS_TTFT = {
    slo_class: metrics.histogram(
        "pdmesh:request_ttft_seconds",
        "Arrival to first token, by class.",
        ["slo_class"],
        buckets=metrics.TTFT_BUCKETS_S,
    ).labels(slo_class=slo_class)
    for slo_class in _SLO_CLASSES
}
_CLASS_TPOT = {
    slo_class: metrics.histogram(
        "pdmesh:request_tpot_seconds",
        "Mean gap between the output tokens of a request, by class.",
        ["slo_class"],
        buckets=metrics.ITL_BUCKETS_S,
    ).labels(slo_class=slo_class)
    for slo_class in _SLO_CLASSES
}
_PART_SECONDS = {
    (slo_class, part): metrics.histogram(
        "pdmesh:request_part_seconds",
        "Where the time of finished requests went, by part.",
        ["slo_class", "part"],
        buckets=metrics.PART_BUCKETS_S,
    ).labels(slo_class=slo_class, part=part)
    for slo_class in _SLO_CLASSES
    for part in PARTS
}
_HIDDEN = metrics.histogram(
    "pdmesh:request_kv_hidden_seconds",
    "KV of a request that moved while its prompt was computed.",
    buckets=metrics.PART_BUCKETS_S,
)


class RequestMetrics:
    """Clock of one sequence, from arrival to its end."""

    __slots__ = (
        "_arrived_s",
        "_first_s",
        "_history",
        "_last_s",
        "_num_prompt_tokens",
        "_num_tokens",
        "_request_id",
        "_slo_class",
        "_timeline",
    )

    def __init__(
        self,
        arrival: Arrival,
        num_prompt_tokens: int,
        *,
        slo_class: SloClass,
        request_id: str,
        history: History,
    ) -> None:
        """Start the clock.

        Args:
            arrival: When the HTTP request came, and what was done since.
            num_prompt_tokens: What it asks to be computed.
            slo_class: Label of some metrics.
            request_id: Names the sequence in the history.
            history: Remembers it, for the dashboard.
        """
        self._request_id = request_id
        self._history = history
        self._arrived_s = arrival.arrived_s
        self._first_s = 0.0
        self._last_s = 0.0
        self._num_tokens = 0
        self._num_prompt_tokens = num_prompt_tokens
        self._slo_class: SloClass = slo_class
        self._timeline = Timeline(arrival)

    def on_attempt(self, workers: tuple[str, ...], sampling: SamplingParams) -> None:
        """An attempt is sent to these workers: decode, and prefill where there is one."""
        if not self._timeline.num_attempts:
            _MAX_TOKENS.observe(sampling.max_tokens)
        self._timeline.on_attempt(time.monotonic(), workers)

    def on_attempt_failed(self) -> None:
        """The attempt is over without a last token."""
        self._timeline.on_attempt_failed(self._last_s)

    def on_tokens(self, num_tokens: int, timing: LegTiming | None = None) -> None:
        """Output tokens arrived now; ``timing`` comes with the first ones of a leg."""
        now_s = time.monotonic()
        if self._num_tokens:
            _ITL.observe((now_s - self._last_s) / num_tokens)
        else:
            self._first_s = now_s
            _TTFT.observe(now_s - self._arrived_s)
            _CLASS_TTFT[self._slo_class].observe(now_s - self._arrived_s)
            self._history.on_first_token(now_s - self._arrived_s)
            _PROMPT_TOKENS.inc(self._num_prompt_tokens)
            _REQUEST_PROMPT_TOKENS.observe(self._num_prompt_tokens)
        self._last_s = now_s
        self._num_tokens += num_tokens
        _GENERATION_TOKENS.inc(num_tokens)
        if timing is not None and self._timeline.on_leg(timing, now_s):
            decode_id, prefill_id = self._timeline.workers
            self._history.on_transfer(prefill_id, decode_id, timing)

    def on_finished(self, reason: str) -> None:
        """The sequence has its last token, or its client left (``abort``)."""
        now_s = time.monotonic()
        self._timeline.finish(self._last_s, now_s)
        _SUCCESS.labels(finished_reason=reason).inc()
        _E2E.observe(now_s - self._arrived_s)
        _REQUEST_GENERATION_TOKENS.observe(self._num_tokens)
        if self._num_tokens > 1:
            tpot_s = (self._last_s - self._first_s) / (self._num_tokens - 1)
            _TPOT.observe(tpot_s)
            _CLASS_TPOT[self._slo_class].observe(tpot_s)
        if reason != "abort":
            self._observe_parts()
        self._remember(reason, now_s)

    def on_failed(self, code: str) -> None:
        """The sequence ended with an error."""
        now_s = time.monotonic()
        self._timeline.finish(self._last_s, now_s)
        self._remember(code, now_s)

    def timing(self) -> dict[str, Any]:
        """Where the time of a finished sequence went, see ``Timeline.as_json``."""
        return self._timeline.as_json(self._num_tokens, self._first_s, self._last_s)

    def _remember(self, outcome: str, now_s: float) -> None:
        self._history.on_ended(
            RequestRecord(
                request_id=self._request_id,
                slo_class=self._slo_class,
                outcome=outcome,
                num_prompt_tokens=self._num_prompt_tokens,
                num_output_tokens=self._num_tokens,
                timing=self.timing(),
                ended_s=now_s,
            )
        )

    def _observe_parts(self) -> None:
        parts = self._timeline.parts
        for part, seconds in parts.items():
            _PART_SECONDS[self._slo_class, part].observe(seconds)
        _HIDDEN.observe(self._timeline.hidden_s)
        _QUEUE.observe(parts["queue"])
        _PREFILL.observe(parts["prefill"])
        _DECODE.observe(self._last_s - self._first_s)
        _INFERENCE.observe(parts["prefill"] + self._last_s - self._first_s)


def token_counts() -> tuple[float, float]:
    """Output and prompt tokens since the process began."""
    return metrics.total(_GENERATION_TOKENS), metrics.total(_PROMPT_TOKENS)


def count_failure(code: str) -> None:
    """A request ended with an error."""
    _FAILED.labels(code=code).inc()
