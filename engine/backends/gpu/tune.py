"""Measures launch configurations on the GPU that is here, for the table of its kind of card.

    python -m engine.backends.gpu.tune [--only NAME] [--write]

Prints every case's times; ``--write`` puts the fastest into ``tuning/<card>.json``, where they
replace the entries of the kernels that were measured. A new card's capability goes into
``tuning.CARD_CAPABILITIES``, so that ``compile_check`` builds its entries from then on.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError

from engine.backends.gpu import kernels, tuning
from engine.backends.gpu.tuning import LaunchConfig
from engine.backends.gpu.tuning_case import TuningCase

_FLUSH_BYTES = 256 << 20  # more than the L2 cache of any card
_WARM_UP_RUNS = 3
_RUNS = 21

Timer = Callable[[Callable[[], object]], float]
"""Runs a launch several times and returns its time in microseconds."""
Entry = dict[str, Any]
"""As it stands in a table's file."""


def find_cases(device: torch.device, only: str = "") -> Iterator[TuningCase]:
    """The cases of all kernels whose table key contains ``only``."""
    for module in kernels.modules().values():
        cases = getattr(module, "tuning_cases", None)
        if cases is not None:
            yield from (case for case in cases(device) if only in case.kernel)


def tune(cases: Iterable[TuningCase], time_us: Timer) -> dict[str, list[Entry]]:
    """Measure every candidate of every case; the fastest of each, as entries by kernel."""
    entries: dict[str, list[Entry]] = {}
    for case in cases:
        times = _measure(case, time_us)
        if not times:
            print(f"{case.kernel} {case.whens[0]}: no candidate can be launched")
            continue
        best, best_us = min(times, key=lambda timed: timed[1])
        print(f"{case.kernel} {case.whens[0]}: {best_us:.1f} us, {_described(best)}")
        for config, time in sorted(times, key=lambda timed: timed[1])[1:]:
            print(f"    {time:.1f} us, {_described(config)}")
        found = {"meta": best.meta, "num_warps": best.num_warps, "num_stages": best.num_stages}
        entries.setdefault(case.kernel, []).extend({"when": when, **found} for when in case.whens)
    return entries


def write_table(path: Path, entries: dict[str, list[Entry]]) -> None:
    """Replace the entries of these kernels in a card's table, which need not exist."""
    table = json.loads(path.read_text()) if path.exists() else {}
    table |= entries
    lines = (
        f"  {json.dumps(kernel)}: [\n    "
        + ",\n    ".join(json.dumps(entry) for entry in table[kernel])
        + "\n  ]"
        for kernel in sorted(table)
    )
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def gpu_timer(device: torch.device) -> Timer:
    """A timer by events around each launch, with a cold L2 cache before it."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def time_us(launch: Callable[[], object]) -> float:
        for _ in range(_WARM_UP_RUNS):
            launch()
        events = []
        for _ in range(_RUNS):
            flush.zero_()  # also keeps the device busy while the launch is queued
            start, end = (_event() for _ in range(2))
            start.record()
            launch()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize(device)
        times_us: list[float] = [1000 * start.elapsed_time(end) for start, end in events]
        return statistics.median(times_us)

    return time_us


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Find launch configurations for this GPU.")
    parser.add_argument("--only", default="", help="kernels whose table key contains this")
    parser.add_argument("--write", action="store_true", help="write them to the card's table")
    options = parser.parse_args(argv)
    card = tuning.card()
    if card is None:
        parser.error("there is no GPU here")
    device = torch.device("cuda", torch.cuda.current_device())
    entries = tune(find_cases(device, options.only), gpu_timer(device))
    if options.write:
        path = tuning.table_path(card)
        write_table(path, entries)
        print(f"wrote {path}")
    return 0


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _measure(case: TuningCase, time_us: Timer) -> list[tuple[LaunchConfig, float]]:
    times = []
    for config in case.candidates:
        try:
            times.append((config, time_us(functools.partial(case.launch, config))))
        except TritonError as error:  # too large for the card, most likely
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            print(f"    {_described(config)}: {reason}")
    return times


def _described(config: LaunchConfig) -> str:
    sizes = " ".join(f"{name}={size}" for name, size in config.meta.items())
    return f"{sizes} warps={config.num_warps} stages={config.num_stages}"


if __name__ == "__main__":
    sys.exit(main())
