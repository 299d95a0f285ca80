"""Starts ``./pdmesh up`` and knows its children, so that no test leaves one behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Up:
    """One ``./pdmesh up`` with its children; ``close()`` leaves none of them."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.temp = folder / "tmp"
        self.temp.mkdir()
        self.errors = folder / "stderr"
        self._children: set[int] = set()
        with self.errors.open("wb") as errors:
            # The script replaces itself by Python: the process id stays.
            self.process = subprocess.Popen(
                [ROOT / "pdmesh", "up", "--device", "cpu", *flags],
                cwd=folder,
                env={**os.environ, "TMPDIR": str(self.temp)},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def children(self) -> dict[str, int]:
        """Process id of each child that runs now: ``valkey``, ``gateway``, ``decode-0``, …"""
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
                words = stat.with_name("cmdline").read_bytes().decode().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[1] == str(self.process.pid) and fields[0] != "Z":
                pid = int(stat.parent.name)
                self._children.add(pid)
                if name := _name(words):
                    found[name] = pid
        return found

    def read_url(self) -> str:
        """Wait until it is ready; where it listens."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready http://"), self.errors.read_text()
        return line.split()[1]

    def finish(self, timeout_s: float) -> tuple[int, str, str]:
        """Exit code, the rest of stdout, and stderr."""
        out, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, self.errors.read_text()

    def left(self) -> list[int]:
        """Children seen earlier that still run."""
        return [pid for pid in self._children if _runs(pid)]

    def close(self) -> None:
        """Kill it and every child."""
        self.children()
        self.process.kill()
        self.process.communicate()
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Poll ``condition``, which another process brings about."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.02)


def _name(words: list[str]) -> str:
    """Empty for the small tools that the script runs before it becomes ``up``."""
    if "cli" not in words:
        return "valkey" if "valkey" in words[0] else ""
    ids = [word.removeprefix("--worker-id=") for word in words if word.startswith("--worker-id=")]
    return ids[0] if ids else words[words.index("cli") + 1]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
