"""What every benchmark prints: the machine it ran on, aligned tables, a JSON file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def format_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table with aligned columns; floats get three significant digits or none."""
    cells = [[_text(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(headings), *cells]) for i in range(len(headings))]
    lines = [headings, ["-" * (width - 1) + ":" for width in widths], *cells]
    return "\n".join(
        "| "
        + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )


def machine() -> str:
    """The processor and the cores that this process may use, for the head of a report."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    return f"{name}, {num_cores()} cores, load average before: {load}"


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def write_json(path: str, content: Any) -> None:
    """Write the raw figures for other programs."""
    Path(path).write_text(json.dumps(content, indent=2) + "\n")


def _text(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    if value != value:  # not measured
        return "–"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
