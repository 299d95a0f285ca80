"""Where a request's time goes: parts that add up, whatever becomes of the attempts."""

from __future__ import annotations

import math

import pytest

from gateway.observe.timeline import Arrival, Timeline
from mesh.leg_timing import LegTiming

ARRIVAL = Arrival(100.0, 100.5, 101.0)
PREFILL = LegTiming(queue_s=1.0, compute_s=2.0)
DECODE = LegTiming(
    queue_s=0.25, compute_s=0.5, kv_wait_s=0.125, kv_hidden_s=7.0, kv_exposed_s=0.125,
    kv_bytes=4096,
)  # fmt: skip
PAIR = ("d", "p")


def expect(timeline: Timeline, total_s: float, **parts: float) -> None:
    shown = {part: seconds for part, seconds in timeline.parts.items() if seconds}
    assert shown == pytest.approx({"receive": 0.5, "tokenise": 0.5, **parts})
    assert sum(shown.values()) == pytest.approx(total_s)


def test_both_legs_lie_in_one_window() -> None:
    timeline = Timeline(ARRIVAL)
    timeline.on_attempt(101.25, PAIR)
    assert not timeline.on_leg(PREFILL, 104.5)
    assert timeline.on_leg(DECODE, 105.75)
    timeline.finish(109.0, 109.5)
    expect(
        timeline, 9.5, dispatch=0.25, queue=1.0, prefill=2.0, kv_wait=0.125, kv_exposed=0.125,
        decode_queue=0.25, decode=0.5 + 3.25, network=0.5, respond=0.5,
    )  # fmt: skip
    assert timeline.hidden_s == 7.0
    assert timeline.kv_bytes == 4096


def test_an_answer_of_one_token_needs_no_decode_worker() -> None:
    timeline = Timeline(ARRIVAL)
    timeline.on_attempt(101.0, PAIR)
    timeline.on_leg(PREFILL, 104.5)
    timeline.finish(104.5, 104.75)
    expect(timeline, 4.75, queue=1.0, prefill=2.0, network=0.5, respond=0.25)


def test_a_decode_worker_alone() -> None:
    timeline = Timeline(ARRIVAL)
    timeline.on_attempt(101.0, ("d",))
    timeline.on_leg(PREFILL, 104.5)
    timeline.finish(106.0, 106.0)
    expect(timeline, 6.0, queue=1.0, prefill=2.0, network=0.5, decode=1.5)


def test_what_a_failed_attempt_took_after_its_last_token_is_retry() -> None:
    timeline = Timeline(ARRIVAL)
    timeline.on_attempt(101.0, PAIR)
    timeline.on_attempt_failed(0.0)  # before any token
    timeline.on_attempt(103.0, PAIR)
    timeline.on_leg(PREFILL, 106.0)
    timeline.on_attempt_failed(106.0)  # after P's
    timeline.on_attempt(107.0, PAIR)
    timeline.on_leg(PREFILL, 110.0)
    timeline.on_leg(DECODE, 111.0)
    timeline.on_attempt_failed(113.0)  # in the middle of decoding
    timeline.on_attempt(114.0, PAIR)
    timeline.on_leg(PREFILL, 117.0)
    timeline.finish(117.0, 117.0)
    expect(
        timeline, 17.0, retry=2.0 + 1.0 + 1.0, queue=3.0, prefill=6.0, kv_wait=0.125,
        kv_exposed=0.125, decode_queue=0.25, decode=0.5 + 2.0,
    )  # fmt: skip
    assert timeline.num_attempts == 4


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -5.0, 1e9])
def test_a_worker_cannot_make_the_parts_add_up_to_more(wrong: float) -> None:
    timeline = Timeline(ARRIVAL)
    timeline.on_attempt(101.0, PAIR)
    timeline.on_leg(LegTiming(queue_s=wrong, compute_s=wrong), 103.0)
    timeline.on_leg(LegTiming(queue_s=wrong, compute_s=0.5, kv_exposed_s=wrong), 104.0)
    timeline.finish(105.0, 105.0)
    assert sum(timeline.parts.values()) == pytest.approx(5.0)
    assert min(timeline.parts.values()) >= 0


def test_one_that_was_given_up_before_any_token() -> None:
    timeline = Timeline(ARRIVAL)
    timeline.on_attempt(101.0, PAIR)
    timeline.finish(0.0, 103.0)
    expect(timeline, 3.0, respond=2.0)
