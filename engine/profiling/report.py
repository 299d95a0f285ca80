"""Digests a profile: a table of ops against the machine's limits, and what bounds the step."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch.profiler import profile

from engine.profiling.limits import Limits
from engine.profiling.ops import ALL_REDUCE, OpWork
from engine.profiling.session import ProfileData, StepTimes

_NUM_TORCH_OPS = 15


def build_report(data: ProfileData) -> dict[str, Any]:
    """What /debug/profile answers, as JSON; takes a second for some hundred thousand events."""
    times = data.times
    report: dict[str, Any] = {
        "steps": times.num_steps,
        "tokens": times.num_tokens,
        "wall_s": times.in_steps_s + times.between_s + times.waiting_s,
        "idle_s": times.idle_s,
        "mean_step_s": times.in_steps_s / times.num_steps if times.num_steps else 0.0,
        "limits": None,
        "ops": [],
        "torch_ops": [],
        "shares": {},
        "bound": "nothing was computed while it waited",
    }
    if data.profiler is None or data.limits is None:
        return report
    seconds = _seconds_by_op(data.profiler, on_device=data.log.with_nvtx)
    rows = [
        _row(key, work, seconds.get(key, 0.0), report["wall_s"], data.limits)
        for key, work in data.log.work.items()
    ]
    rows.sort(key=lambda row: -row["time_s"])
    report["limits"] = {
        "bytes_per_s": data.limits.bytes_per_s,
        "flops_per_s": data.limits.flops_per_s,
    }
    report["ops"] = rows
    report["torch_ops"] = _torch_ops(data.profiler)
    report["shares"] = shares(rows, times)
    report["bound"] = verdict(report["shares"], rows)
    return report


def shares(rows: list[dict[str, Any]], times: StepTimes) -> dict[str, float]:
    """How much of the wall clock went to what, 0 to 1; they add up to 1.

    An op counts as memory or compute by which of the two limits it is nearer to, or as
    communication between ranks.
    """
    by_bound = {"compute": 0.0, "memory": 0.0, "communication": 0.0}
    for row in rows:
        by_bound[row["bound"]] += row["time_s"]
    # On a device ops may overlap what the host does: then nothing is left for gaps.
    gaps_s = max(0.0, times.in_steps_s + times.between_s - sum(by_bound.values()))
    by_bound["communication"] += times.waiting_s
    parts = {**by_bound, "launch gaps": gaps_s}
    total_s = sum(parts.values()) or 1.0
    return {name: part / total_s for name, part in parts.items()}


def verdict(parts: dict[str, float], rows: list[dict[str, Any]]) -> str:
    """One line that says what bounds the step, and how near to its limit that runs."""
    first, *others = sorted(parts, key=lambda name: -parts[name])
    rest = ", ".join(f"{name} {parts[name]:.0%}" for name in others)
    # How fast ranks could talk is not measured.
    bound = [row for row in rows if row["bound"] == first != "communication"]
    time_s = sum(row["time_s"] for row in bound)
    near = ""
    if time_s:
        reached = sum(row["time_s"] * row["of_limit"] for row in bound) / time_s
        near = f", at {reached:.0%} of that limit"
    return f"bound by {first}: {parts[first]:.0%} of the time{near} ({rest})"


def _row(
    key: tuple[str, str], work: OpWork, time_s: float, wall_s: float, limits: Limits
) -> dict[str, Any]:
    memory_s = work.num_bytes / limits.bytes_per_s
    compute_s = work.num_flops / limits.flops_per_s
    bound = "compute" if compute_s > memory_s else "memory"
    return {
        "phase": key[0],
        "op": key[1],
        "calls": work.num_calls,
        "time_s": time_s,
        "share": time_s / wall_s if wall_s else 0.0,
        "bytes_per_s": work.num_bytes / time_s if time_s else 0.0,
        "flops_per_s": work.num_flops / time_s if time_s else 0.0,
        "of_limit": max(memory_s, compute_s) / time_s if time_s else 0.0,
        "bound": "communication" if key[1] == ALL_REDUCE else bound,
    }


def _seconds_by_op(profiler: profile, *, on_device: bool) -> dict[tuple[str, str], float]:
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for event in profiler.events() or ():  # type: ignore[no-untyped-call]
        parts = event.name.split("/")
        if len(parts) < 2 or parts[0] not in ("prefill", "decode", "mixed"):
            continue
        micros = event.device_time_total if on_device else event.time_range.elapsed_us()
        seconds[parts[0], parts[1]] += micros * 1e-6
    return seconds


def _torch_ops(profiler: profile) -> list[dict[str, Any]]:
    """PyTorch's own ops that took most; the CPU backend's kernels are not among them."""
    averages = [event for event in profiler.key_averages() if "/" not in event.key]
    averages.sort(key=lambda event: -event.self_cpu_time_total)
    return [
        {
            "name": event.key,
            "calls": event.count,
            "self_cpu_s": event.self_cpu_time_total * 1e-6,
            "self_device_s": getattr(event, "self_device_time_total", 0.0) * 1e-6,
        }
        for event in averages[:_NUM_TORCH_OPS]
    ]
