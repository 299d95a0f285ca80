"""Backoff and the rate-limited log, with an injected clock."""

import logging

import pytest

from mesh.backoff import Backoff
from mesh.telemetry.rate_limited_log import RateLimitedLog


def test_delays_double_up_to_the_cap_and_start_over() -> None:
    backoff = Backoff(0.1, 1.0, jitter=0.0)
    assert [backoff.next_delay_s() for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    backoff.reset()
    assert backoff.next_delay_s() == 0.1


def test_jitter_only_shortens() -> None:
    delays = [Backoff(1.0, 1.0, jitter=0.5).next_delay_s() for _ in range(200)]
    assert all(0.5 <= delay <= 1.0 for delay in delays)
    assert len(set(delays)) > 100


def test_a_flood_is_one_line_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    log = RateLimitedLog(logging.getLogger("flood"), interval_s=5.0, clock=lambda: now_s)
    for i in range(100):
        log.warning("bad message n=%d", i)
    now_s = 5.0
    log.warning("bad message n=%d", 100)
    assert [record.getMessage() for record in caplog.records] == [
        "bad message n=0",
        "bad message n=100 suppressed=99",
    ]
