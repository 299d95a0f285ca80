"""Prometheus metrics of requests, under vLLM's names."""

from __future__ import annotations

import time

from mesh import metrics
from mesh.local_metrics import LocalCounter, LocalHistogram

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
_SUCCESS = metrics.counter(metrics.REQUEST_SUCCESS, "Finished requests.", ["finished_reason"])
_FAILED = metrics.counter("pdmesh:gateway_requests_failed", "Requests that failed.", ["code"])


class RequestMetrics:
    """Clock of one sequence, from arrival to its end."""

    __slots__ = ("_arrived_s", "_first_s", "_last_s", "_num_prompt_tokens", "_num_tokens")

    def __init__(self, arrived_s: float, num_prompt_tokens: int) -> None:
        """Args: arrived_s: ``time.monotonic()`` when the HTTP request came."""
        self._arrived_s = arrived_s
        self._first_s = 0.0
        self._last_s = 0.0
        self._num_tokens = 0
        self._num_prompt_tokens = num_prompt_tokens

    def on_tokens(self, num_tokens: int) -> None:
        """Output tokens arrived now."""
        now_s = time.monotonic()
        if self._num_tokens:
            _ITL.observe((now_s - self._last_s) / num_tokens)
        else:
            self._first_s = now_s
            _TTFT.observe(now_s - self._arrived_s)
            _PROMPT_TOKENS.inc(self._num_prompt_tokens)
            _REQUEST_PROMPT_TOKENS.observe(self._num_prompt_tokens)
        self._last_s = now_s
        self._num_tokens += num_tokens
        _GENERATION_TOKENS.inc(num_tokens)

    def on_finished(self, reason: str) -> None:
        """The sequence has its last token."""
        _SUCCESS.labels(finished_reason=reason).inc()
        _E2E.observe(time.monotonic() - self._arrived_s)
        _REQUEST_GENERATION_TOKENS.observe(self._num_tokens)
        if self._num_tokens > 1:
            _TPOT.observe((self._last_s - self._first_s) / (self._num_tokens - 1))


def count_failure(code: str) -> None:
    """A request ended with an error."""
    _FAILED.labels(code=code).inc()
