"""Tracing: off by default at no cost; spans and their context. Whole traces: integration tests."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time

import pytest

import mesh.telemetry.tracing
from mesh.telemetry.tracing import Tracing, open_tracing, wall_ns


def test_without_an_endpoint_nothing_is_imported() -> None:
    # The SDK's metrics are, by redis-py, wherever they are installed.
    unwanted = ("opentelemetry.exporter", "opentelemetry.proto", "opentelemetry.sdk.trace.export")
    script = (
        "import sys, gateway.main, mesh.telemetry.tracing\n"
        "assert mesh.telemetry.tracing.open_tracing('', 'gateway', 'g') is None\n"
        f"sys.exit(any(name.startswith({unwanted}) for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_moments_become_wall_clock() -> None:
    ago_s = 2.5
    before_ns = time.time_ns()
    found_ns = wall_ns(time.monotonic() - ago_s) + int(ago_s * 1e9)
    slack_ns = 1_000_000  # two clocks, one of them adjusted
    assert before_ns - slack_ns <= found_ns <= time.time_ns() + slack_ns


def test_a_collector_that_is_not_there_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh.telemetry.tracing, "_CLOSE_TIMEOUT_S", 0.1)
    tracing = open_tracing("http://127.0.0.1:9", "gateway", "g")
    assert isinstance(tracing, Tracing)
    now_s = time.monotonic()
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    child = tracing.start("child", parent=parent, start_s=now_s)
    assert re.fullmatch(rf"00-{'a' * 32}-(?!b{{16}})[0-9a-f]{{16}}-01", child.traceparent)
    unsampled = tracing.start("quiet", parent=f"{parent[:-2]}00", start_s=now_s)
    assert unsampled.traceparent.endswith("-00")
    for wrong in ("", "nonsense", parent + "x" * 10_000, "00-" + "0" * 32 + "-" + "0" * 16 + "-01"):
        other = tracing.start("root", parent=wrong, start_s=now_s)
        assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[13]", other.traceparent), wrong
        assert "a" * 32 not in other.traceparent
        other.end(now_s)
    child.end(now_s, {"x": 1}, error="worker_lost")
    unsampled.end(now_s)
    tracing.close()
    assert any(thread.name == "tracing" for thread in threading.enumerate()), "it still tries"
    # The exporter gives up a moment later; until then it draws random numbers, which Hypothesis
    # does not forgive in the tests that follow.
    for thread in threading.enumerate():
        if thread.name in ("OtelBatchSpanRecordProcessor", "tracing"):
            thread.join(timeout=20)
            assert not thread.is_alive()
