"""One child process of ``pdmesh up``: started with a log file, watched, stopped, never left behind.

new ── start() ──> running ── exits ──> ended ── start() ──> running …
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_POLL_INTERVAL_S = 0.02
_TAIL_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to run."""

    name: str
    """Shown to the user; also the log file's name."""
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's environment."""
    stdin: bytes = b""
    """Given to the child on its standard input: secrets that must not show in the process list."""


class ChildProcess:
    """Owns one child at a time; ``stop()`` or ``kill()`` reaps it.

    The child leads its own session: a Ctrl-C in the terminal reaches only ``pdmesh up``, which
    stops its children in order.
    """

    def __init__(self, spec: ChildSpec, log_dir: Path) -> None:
        self.spec = spec
        self.log_path = log_dir / f"{spec.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the running child, None when none runs."""
        return self._process.pid if self._process is not None and self.running else None

    @property
    def running(self) -> bool:
        """Whether a child was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_text(self) -> str:
        """How the last child ended, for people."""
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return "is running" if self._process is not None else "was not started"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def start(self) -> None:
        """Start the child; must be called from the main thread (see ``mesh.parent_watch``).

        Raises:
            OSError: the program cannot be run.
        """
        assert not self.running, f"{self.spec.name} is already running"
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.spec.argv,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.spec.env},
                # Not a session of its own: where Linux groups tasks by session, priorities count
                # within one only.
                process_group=0,
            )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(self.spec.stdin)
            self._process.stdin.close()
        except BrokenPipeError:
            # It ended already; whoever watches it will see.
            pass

    def terminate(self) -> None:
        """Ask the child to stop."""
        if self.running:
            assert self._process is not None
            self._process.terminate()

    def kill(self) -> None:
        """Kill the child and whatever it started, and reap it."""
        if not self.running:
            return
        assert self._process is not None
        # Not reaped yet, so the group id is still its own.
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait(self, timeout_s: float) -> bool:
        """Block until the child has ended; False when it still runs after ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while self.running:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_INTERVAL_S)
        return True

    def last_log_lines(self, num_lines: int) -> list[str]:
        """The end of the child's log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return []
        return list(deque((line for line in text.splitlines() if line.strip()), num_lines))
