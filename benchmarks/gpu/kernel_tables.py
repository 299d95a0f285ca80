"""Correctness and speed of every kernel, as rows of tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch

from benchmarks.gpu import attention_cases, product_cases, small_cases, transfer_cases
from benchmarks.gpu.case import Case
from benchmarks.gpu.stopwatch import Floors, Stopwatch

ERROR_HEADINGS = ("kernel", "inputs", "error", "bound", "")
SPEED_HEADINGS = ("kernel", "inputs", "µs", "floor µs", "floor / time", "target", "")
Row = list[object]


def all_checks(device: torch.device, only: str = "") -> Iterator[Case]:
    """Small inputs of every kernel; ``only``: a pattern of the names wanted."""
    for module in (small_cases, product_cases, transfer_cases, attention_cases):
        yield from _chosen(module.checks(device), only)


def all_timed(device: torch.device, only: str = "") -> Iterator[Case]:
    """Inputs of real models."""
    for module in (attention_cases, product_cases, transfer_cases, small_cases):
        yield from _chosen(module.timed(device), only)


def error_rows(cases: Iterable[Case]) -> list[Row]:
    """The last cell says whether the error is within its bound."""
    rows: list[Row] = []
    for case in cases:
        error = case.error()
        verdict = "ok" if error <= case.bound else "WRONG"
        rows.append([case.kernel, case.inputs, f"{error:.1e}", f"{case.bound:.0e}", verdict])
    return rows


def speed_rows(cases: Iterable[Case], watch: Stopwatch, floors: Floors) -> list[Row]:
    """Each case is checked first; the last cell says whether it is exact and meets its target."""
    rows: list[Row] = []
    for case in cases:
        is_exact = case.error() <= case.bound
        seconds = watch.seconds(case.run)
        floor_s = floors.seconds(case.num_bytes, case.num_flops)
        share = floor_s / seconds
        verdict = "ok" if is_exact and share >= case.target else "SLOW" if is_exact else "WRONG"
        rows.append([
            case.kernel, case.inputs, seconds * 1e6, floor_s * 1e6, share,
            case.target or "–", verdict,
        ])  # fmt: skip
    return rows


def _chosen(cases: Iterable[Case], only: str) -> Iterator[Case]:
    # Cases are made one at a time: the memory of one is free before the next.
    return (case for case in cases if re.search(only, f"{case.kernel} {case.inputs}"))
