"""Looks for faster launch configurations on this card, and writes its table.

From the configuration in use, one thing is changed at a time and kept while it helps: half and
double of each block size, warps, pipeline stages. What does not compile, does not fit or is not
exact is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from benchmarks.gpu.case import Case
from benchmarks.gpu.stopwatch import Stopwatch
from engine.backends.gpu.tuning import (
    Key,
    LaunchConfig,
    conditions_of,
    launch_config,
    overriding,
)

Table = dict[str, list[dict[str, Any]]]
_GAIN = 0.97
"""A table entry must be this much faster to be worth its difference."""
_WARPS = (2, 4, 8, 16)
_STAGES = (1, 2, 3, 4, 5)
_LARGEST_BLOCK = 4096


def tune(cases: Iterable[Case], watch: Stopwatch, log: Any = print) -> Table:
    """Entries that beat what the tables have, by kernel."""
    found: Table = {}
    seen: set[tuple[str, str]] = set()
    for case in cases:
        for kernel, key in _launches(case):
            conditions = conditions_of(kernel, **key)
            place = kernel, json.dumps(conditions, sort_keys=True)
            if place in seen:
                continue
            seen.add(place)
            old = launch_config(kernel, **key)
            old_s = _seconds(case, kernel, old, watch)
            new, new_s = _search(case, kernel, old, old_s, watch)
            log(f"{kernel} {key}: {old_s * 1e6:.1f} → {new_s * 1e6:.1f} µs {new}")
            if new_s < _GAIN * old_s:
                entry = {"when": conditions, **msgspec.to_builtins(new)}
                found.setdefault(kernel, []).append(entry)
    return found


def merge_into(path: Path, found: Table) -> None:
    """Put the entries before those that the card's table has, in place of equal conditions."""
    table: Table = json.loads(path.read_text()) if path.is_file() else {}
    for kernel, entries in found.items():
        conditions = [entry["when"] for entry in entries]
        # In the file, a range is a list.
        known = json.loads(json.dumps(conditions))
        kept = [entry for entry in table.get(kernel, []) if entry.get("when", {}) not in known]
        table[kernel] = entries + kept
    path.write_text(json.dumps(table, indent=2) + "\n")


def _launches(case: Case) -> list[tuple[str, dict[str, Key]]]:
    """Kernels that the case asks configurations for."""
    asked: list[tuple[str, dict[str, Key]]] = []

    def note(kernel: str, key: dict[str, Key]) -> None:
        asked.append((kernel, key))

    with overriding(note):
        case.run()
    return asked


def _search(
    case: Case, kernel: str, config: LaunchConfig, seconds: float, watch: Stopwatch
) -> tuple[LaunchConfig, float]:
    while True:
        timed = [(_seconds(case, kernel, other, watch), other) for other in _changed(config)]
        best_s, best = min(timed, key=lambda pair: pair[0], default=(seconds, config))
        if best_s >= _GAIN * seconds:
            return config, seconds
        config, seconds = best, best_s


def _changed(config: LaunchConfig) -> Iterator[LaunchConfig]:
    for name, size in config.meta.items():
        for other in (size // 2, size * 2):
            if 0 < other <= _LARGEST_BLOCK:
                yield replace(config, meta={**config.meta, name: other})
    for num_warps in _WARPS:
        if num_warps != config.num_warps:
            yield replace(config, num_warps=num_warps)
    for num_stages in _STAGES:
        if num_stages != config.num_stages:
            yield replace(config, num_stages=num_stages)


def _seconds(case: Case, kernel: str, config: LaunchConfig, watch: Stopwatch) -> float:
    """Infinite where it can't be launched or is wrong."""

    def choose(asked: str, key: dict[str, Key]) -> LaunchConfig | None:
        return config if asked == kernel else None

    with overriding(choose):
        try:
            if case.error() > case.bound:
                return float("inf")
            return watch.seconds(case.run)
        except Exception:  # Triton's errors of compiling and of resources have no common base
            return float("inf")
