"""Metrics that one thread writes, for what happens once a token.

The Prometheus library's own take a lock for every value they touch, and a histogram looks through
its buckets one by one: microseconds, of which a token has few. These are plain numbers, put into
the library's form when somebody asks. ``observe`` and ``inc`` belong to one thread; any may
collect.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString


class LocalCounter:
    """A counter without labels, rendered as ``<name>_total``."""

    def __init__(self, name: str, documentation: str, *, registry: CollectorRegistry) -> None:
        self._name, self._documentation = name, documentation
        self._value = 0
        registry.register(self)

    def inc(self, amount: int = 1) -> None:
        """Add ``amount``."""
        self._value += amount

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        yield CounterMetricFamily(self._name, self._documentation, value=self._value)


class LocalHistogram:
    """A histogram without labels."""

    def __init__(
        self,
        name: str,
        documentation: str,
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        """Args: buckets: Upper bounds, growing; infinity is added."""
        self._name, self._documentation = name, documentation
        self._bounds = (*buckets, float("inf"))
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count ``value`` in the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        totals = accumulate(self._counts)
        yield HistogramMetricFamily(
            self._name,
            self._documentation,
            buckets=[
                (str(floatToGoString(bound)), total)  # type: ignore[no-untyped-call]
                for bound, total in zip(self._bounds, totals, strict=True)
            ],
            sum_value=self._sum,
        )
