"""What a profile concludes from the times and the work of ops."""

from __future__ import annotations

from typing import Any

import pytest

from engine.profiling.report import shares, verdict
from engine.profiling.session import StepTimes


def row(bound: str, time_s: float, of_limit: float = 0.5) -> dict[str, Any]:
    return {"bound": bound, "time_s": time_s, "of_limit": of_limit}


@pytest.mark.parametrize(
    ("compute_s", "memory_s", "between_s", "waiting_s", "bound"),
    [
        (5.0, 1.0, 1.0, 1.0, "bound by compute: 50% of the time, at 50% of that limit"),
        (1.0, 5.0, 1.0, 1.0, "bound by memory: 50% of the time, at 50% of that limit"),
        (1.0, 1.0, 5.0, 1.0, "bound by launch gaps: 70% of the time ("),
        (1.0, 1.0, 1.0, 5.0, "bound by communication: 50% of the time ("),
    ],
)
def test_the_largest_share_bounds_the_step(
    compute_s: float, memory_s: float, between_s: float, waiting_s: float, bound: str
) -> None:
    rows = [row("compute", compute_s), row("memory", memory_s)]
    times = StepTimes(
        in_steps_s=compute_s + memory_s + 2.0, between_s=between_s, waiting_s=waiting_s
    )
    parts = shares(rows, times)
    assert sum(parts.values()) == pytest.approx(1)
    assert verdict(parts, rows).startswith(bound)


def test_time_in_collectives_is_communication() -> None:
    rows = [row("communication", 3.0), row("memory", 1.0)]
    parts = shares(rows, StepTimes(in_steps_s=5.0, waiting_s=1.0))
    assert parts["communication"] == pytest.approx(4 / 6)
    assert parts["launch gaps"] == pytest.approx(1 / 6)
    assert verdict(parts, rows).startswith("bound by communication: 67% of the time (")


def test_ops_that_overlap_on_a_device_leave_no_gap() -> None:
    parts = shares([row("compute", 3.0)], StepTimes(in_steps_s=2.0))
    assert parts == {"compute": 1.0, "memory": 0.0, "launch gaps": 0.0, "communication": 0.0}
