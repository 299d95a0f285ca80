"""The process's Prometheus registry and the names every role shares.

Names are vLLM's (``vllm:…``) where vLLM has one, so that its dashboards work; ours start with
``pdmesh:``. Roles create what they count once, at start, through ``counter``/``gauge``/
``histogram``, which return the existing metric when the name is already registered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.registry import Collector

from mesh.telemetry.local_metrics import LocalCounter

_IDENTITY: dict[str, str] = {}
_IDENTIFIED = ("vllm:", "pdmesh:request_")

_Metric = TypeVar("_Metric")

CONTENT_TYPE: str = CONTENT_TYPE_LATEST
"""Value of the Content-Type header that goes with ``render()``."""

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)

# vLLM's names.
NUM_REQUESTS_RUNNING = "vllm:num_requests_running"
NUM_REQUESTS_WAITING = "vllm:num_requests_waiting"
KV_CACHE_USAGE = "vllm:kv_cache_usage_perc"
PREFIX_CACHE_QUERIES = "vllm:prefix_cache_queries"
PREFIX_CACHE_HITS = "vllm:prefix_cache_hits"
NUM_PREEMPTIONS = "vllm:num_preemptions"
PROMPT_TOKENS = "vllm:prompt_tokens"
GENERATION_TOKENS = "vllm:generation_tokens"
REQUEST_SUCCESS = "vllm:request_success"
TIME_TO_FIRST_TOKEN = "vllm:time_to_first_token_seconds"
INTER_TOKEN_LATENCY = "vllm:inter_token_latency_seconds"
TIME_PER_OUTPUT_TOKEN = "vllm:request_time_per_output_token_seconds"
E2E_LATENCY = "vllm:e2e_request_latency_seconds"
REQUEST_PROMPT_TOKENS = "vllm:request_prompt_tokens"
REQUEST_GENERATION_TOKENS = "vllm:request_generation_tokens"
REQUEST_PARAMS_MAX_TOKENS = "vllm:request_params_max_tokens"
REQUEST_QUEUE_TIME = "vllm:request_queue_time_seconds"
REQUEST_PREFILL_TIME = "vllm:request_prefill_time_seconds"
REQUEST_DECODE_TIME = "vllm:request_decode_time_seconds"
REQUEST_INFERENCE_TIME = "vllm:request_inference_time_seconds"
ITERATION_TOKENS = "vllm:iteration_tokens_total"

_ALIASES = {
    INTER_TOKEN_LATENCY: "vllm:time_per_output_token_seconds",
    KV_CACHE_USAGE: "vllm:gpu_cache_usage_perc",
    REQUEST_GENERATION_TOKENS: "vllm:request_max_num_generation_tokens",
}
"""Rendered a second time under the names that older boards of vLLM ask for."""

# fmt: off
TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
ITL_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)
LATENCY_BUCKETS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)
PART_BUCKETS_S = (
    0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    30.0, 60.0, 300.0,
)
TOKEN_COUNT_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000,
)
# fmt: on


def counter(name: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
    """Create or find a counter; its sample is rendered as ``<name>_total``."""
    found = _find(name, Counter)
    return found if found is not None else Counter(name, documentation, labels, registry=REGISTRY)


def count_to(name: str, documentation: str, value: float) -> None:
    """Bring a counter to a count that is kept elsewhere and never falls."""
    found = counter(name, documentation)
    found.inc(value - total(found))


def total(counted: Counter | LocalCounter) -> float:
    """What a counter without labels has counted."""
    (metric,) = counted.collect()
    return next(sample.value for sample in metric.samples if sample.name.endswith("_total"))


def gauge(name: str, documentation: str, labels: Sequence[str] = ()) -> Gauge:
    """Create or find a gauge."""
    found = _find(name, Gauge)
    return found if found is not None else Gauge(name, documentation, labels, registry=REGISTRY)


def histogram(
    name: str, documentation: str, labels: Sequence[str] = (), *, buckets: Sequence[float]
) -> Histogram:
    """Create or find a histogram with the given upper bounds."""
    found = _find(name, Histogram)
    if found is not None:
        return found
    return Histogram(name, documentation, labels, registry=REGISTRY, buckets=buckets)


def identify(model_name: str, engine: str) -> None:
    """Have ``render`` label every ``vllm:`` and ``pdmesh:request_`` sample with these two.

    That is how vLLM's boards find them. Nothing is paid where metrics are observed.

    Args:
        model_name: The served model.
        engine: The worker's id; ``gateway`` on a gateway.
    """
    _IDENTITY.update(model_name=model_name, engine=engine)


def render() -> bytes:
    """All metrics of this process in the Prometheus text format."""
    return generate_latest(_Identified())


class _Identified(Collector):
    """The registry's metrics with the process's labels."""

    def collect(self) -> Iterator[Metric]:
        for metric in REGISTRY.collect():
            if _IDENTITY and metric.name.startswith(_IDENTIFIED):
                metric.samples = [
                    sample._replace(labels={**_IDENTITY, **sample.labels})
                    for sample in metric.samples
                ]
            yield metric
            if metric.name in _ALIASES:
                yield _renamed(metric, _ALIASES[metric.name])


def _renamed(metric: Metric, name: str) -> Metric:
    copy = Metric(name, metric.documentation, metric.type)
    copy.samples = [
        sample._replace(name=name + sample.name.removeprefix(metric.name))
        for sample in metric.samples
    ]
    return copy


def _find(name: str, kind: type[_Metric]) -> _Metric | None:
    # Private, and stable since 2018; the public API offers no look-up and raises on a second use.
    found = REGISTRY._names_to_collectors.get(name)
    if found is None:
        return None
    if not isinstance(found, kind):
        raise ValueError(f"{name} is already a {type(found).__name__}")
    return found


LINK_BAD_MESSAGES = counter(
    "pdmesh:link_bad_messages", "Messages dropped because they were not acceptable.", ["code"]
)
LINK_SENDS_REFUSED = counter(
    "pdmesh:link_sends_refused", "Messages not sent: peer gone or its queue full."
)
