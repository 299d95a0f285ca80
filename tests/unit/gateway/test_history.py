"""What a gateway remembers: right figures, bounded in every direction."""

from __future__ import annotations

import itertools
import random
from typing import Any

import orjson
import pytest

from gateway.observe import quantile_sketch, time_slots, transfer_flows
from gateway.observe.history import MAX_REQUESTS, History, RequestRecord
from gateway.observe.quantile_sketch import QuantileSketch
from gateway.observe.time_slots import ClusterLoad
from gateway.observe.timeline import Arrival, Timeline
from mesh.leg_timing import LegTiming

IDLE = ClusterLoad(0, 0, 0, 0, 0, 0.0)


class Clock:
    """Stands still until it is moved."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def history(clock: Clock) -> History:
    return History(slot_s=5.0, clock=clock)


def ended(
    clock: Clock, name: str = "r", outcome: str = "stop", num_tokens: int = 11
) -> RequestRecord:
    timeline = Timeline(Arrival(0.0, 0.0, 0.0))
    timeline.finish(2.0, 2.0)
    return RequestRecord(
        request_id=name, slo_class="interactive", outcome=outcome, num_prompt_tokens=7,
        num_output_tokens=num_tokens, timing=timeline.as_json(num_tokens, 1.0, 2.0),
        ended_s=clock.now_s,
    )  # fmt: skip


def transfer(num_bytes: int, hidden_s: float = 0.0, exposed_s: float = 0.0) -> LegTiming:
    return LegTiming(
        queue_s=0.0, compute_s=0.0, kv_wait_s=0.5, kv_hidden_s=hidden_s, kv_exposed_s=exposed_s,
        kv_bytes=num_bytes,
    )  # fmt: skip


def test_quantiles_are_within_their_error_and_merge() -> None:
    rng = random.Random(1)
    values = [rng.lognormvariate(-2, 1.5) for _ in range(5000)]
    halves = [QuantileSketch(), QuantileSketch()]
    for value, sketch in zip(values, itertools.cycle(halves)):
        sketch.add(value)
    merged = QuantileSketch.merged(halves)
    values.sort()
    for share in (0.01, 0.5, 0.95, 0.99, 1.0):
        exact = values[max(0, round(share * len(values)) - 1)]
        assert merged.quantile(share) == pytest.approx(exact, rel=0.026)


def test_a_sketch_never_holds_more_than_its_buckets() -> None:
    sketch = QuantileSketch()
    assert sketch.quantile(0.5) is None
    for exponent in range(-4000, 4000):
        sketch.add(1.01**exponent)
    for value in (0.0, -1.0, 1e300, float("inf")):
        sketch.add(value)
    assert len(sketch._counts) <= quantile_sketch.MAX_BUCKETS
    assert sketch.num_values == 8004
    assert sketch.quantile(1.0) == pytest.approx(1e4, rel=0.05)


def test_series_and_summary(history: History, clock: Clock) -> None:
    history.sample(IDLE, 100.0, 50.0)  # counted before: not of this slot
    history.on_first_token(0.2)
    history.sample(ClusterLoad(1, 2, 3, 4, 400, 0.5), 150.0, 60.0)
    history.sample(ClusterLoad(2, 1, 0, 9, 100, 0.25), 200.0, 70.0)
    history.on_ended(ended(clock))
    history.on_ended(ended(clock, outcome="worker_lost"))
    history.on_ended(ended(clock, outcome="abort", num_tokens=1))
    assert history.as_json()["series"]["finished"] == []  # the slot is open
    clock.now_s += 10.0  # one slot passes in which nothing is looked at
    shown = history.as_json()
    series, summary = shown["series"], shown["summary"]
    assert series["output_tokens_per_s"] == [20.0, None]
    assert series["prompt_tokens_per_s"] == [4.0, None]
    assert series["decode_running"] == [2, None]
    assert series["prefill_waiting"] == [3, None]
    assert series["decode_waiting"] == [9, None]
    assert series["kv_used"] == [0.5, None]
    assert series["finished"] == [1, None]
    assert series["failed"] == [1, None]
    assert series["ttft_p95_s"] == [pytest.approx(0.2, rel=0.026), None]
    assert series["tpot_p50_s"] == [pytest.approx(0.1, rel=0.026), None]
    assert summary["ttft_p99_s"] == pytest.approx(0.2, rel=0.026)
    assert (summary["finished"], summary["failed"]) == (1, 1)
    clock.now_s += 65.0
    summary = history.as_json()["summary"]
    assert summary["ttft_p50_s"] is None
    assert summary["finished"] == 0


def test_slots_are_forgotten(history: History, clock: Clock) -> None:
    for _ in range(3 * time_slots.NUM_SLOTS):
        history.on_first_token(0.1)
        history.sample(IDLE, 0.0, 0.0)
        clock.now_s += 5.0
    series = history.as_json()["series"]
    assert {len(column) for column in series.values()} == {time_slots.NUM_SLOTS}
    assert len(history._slots._slots) <= time_slots.NUM_SLOTS + 1


def test_flows_are_summed_by_pair_and_forgotten(history: History, clock: Clock) -> None:
    history.on_transfer("p0", "d0", transfer(100, 0.25, 0.125))
    history.on_transfer("p0", "d1", transfer(1000, 0.0, 1.0))
    history.on_transfer("p1", "d1", transfer(0))  # D had all of it
    clock.now_s += transfer_flows.SLOT_S
    history.on_transfer("p0", "d0", transfer(50, 0.25, 0.125))
    larger, smaller = history.as_json()["flows"]
    assert (larger["decode"], larger["bytes"]) == ("d1", 1000)
    assert smaller == {
        "prefill": "p0", "decode": "d0", "transfers": 2, "bytes": 150, "hidden_s": 0.5,
        "exposed_s": 0.25, "wait_s": 1.0,
    }  # fmt: skip
    clock.now_s += transfer_flows.SLOT_S * (transfer_flows.NUM_SLOTS - 1)
    assert [flow["bytes"] for flow in history.as_json()["flows"]] == [50]
    clock.now_s += transfer_flows.SLOT_S
    assert history.as_json()["flows"] == []


def test_pairs_and_a_workers_word_are_bounded(history: History) -> None:
    for number in range(transfer_flows.MAX_PAIRS + 50):
        history.on_transfer(f"p{number}", "d", transfer(1 << 63))
    shown = history.as_json()
    assert len(shown["flows"]) <= transfer_flows.MAX_PAIRS
    assert len(history._flows._slots[0][1]) == transfer_flows.MAX_PAIRS + 1
    assert shown["flows"][0]["prefill"] == ""
    assert shown["flows"][0]["transfers"] == 50
    orjson.dumps(shown)  # which takes no number over 64 bits


def test_the_latest_requests_are_kept(history: History, clock: Clock) -> None:
    for number in range(MAX_REQUESTS + 10):
        history.on_ended(ended(clock, f"r{number}"))
    clock.now_s += 3.0
    requests: list[dict[str, Any]] = history.as_json()["requests"]
    assert len(requests) == MAX_REQUESTS
    assert requests[0]["id"] == f"r{MAX_REQUESTS + 9}"
    assert requests[0]["age_s"] == 3.0
    assert requests[0]["parts"]["decode_s"] == 2.0
    assert not requests[0]["failed"]
