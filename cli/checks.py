"""``pdmesh check`` and ``pdmesh test``: the project's own tools, run on its source."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_CHECKS: tuple[tuple[str, ...], ...] = (
    ("ruff", "format", "--check", "."),
    ("ruff", "check", "."),
    ("mypy",),
    ("lint-imports",),
)


def run_checks() -> int:
    """Run every check, also after one failed; 1 when any did."""
    failed = []
    for check in _CHECKS:
        # Installed beside the interpreter, which need not be on PATH.
        program = Path(sys.executable).parent / check[0]
        print(f"== {' '.join(check)}", flush=True)
        if subprocess.run([program, *check[1:]], cwd=ROOT, check=False).returncode:
            failed.append(" ".join(check))
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def run_tests(arguments: Sequence[str]) -> int:
    """Replace this process by pytest on the whole suite; paths are relative to the root."""
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "pytest", *arguments])
