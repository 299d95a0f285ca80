"""Quantiles of durations in bounded memory: counts in buckets that grow by a constant ratio.

The idea of DDSketch (Masson, Rim, Lee, VLDB 2019) without its collapsing: the range is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

_RATIO = 1.05
_LOG_RATIO = math.log(_RATIO)
_LEAST_S = 1e-5
_MOST_S = 1e4
_LAST_BUCKET = math.ceil(math.log(_MOST_S / _LEAST_S) / _LOG_RATIO)

MAX_BUCKETS = _LAST_BUCKET + 1
"""Most entries that a sketch ever holds."""


class QuantileSketch:
    """Durations between 10 µs and 10,000 s (others count as these), to ±2.5 %."""

    __slots__ = ("_counts", "num_values")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.num_values = 0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        bucket = 0
        if seconds > _LEAST_S:
            bucket = math.ceil(math.log(min(seconds, _MOST_S) / _LEAST_S) / _LOG_RATIO)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self.num_values += 1

    def quantile(self, share: float) -> float | None:
        """The duration below which ``share`` (0 … 1) of them are; None without any."""
        rank = max(1, math.ceil(share * self.num_values))
        for bucket in sorted(self._counts):
            rank -= self._counts[bucket]
            if rank <= 0:
                # The bucket ends at ratio^bucket; its middle is half a bucket below.
                return _LEAST_S * math.exp((bucket - 0.5) * _LOG_RATIO)
        return None

    @classmethod
    def merged(cls, sketches: Iterable[QuantileSketch]) -> QuantileSketch:
        """All durations of ``sketches`` in a new one."""
        whole = cls()
        for sketch in sketches:
            whole.num_values += sketch.num_values
            for bucket, count in sketch._counts.items():
                whole._counts[bucket] = whole._counts.get(bucket, 0) + count
        return whole
