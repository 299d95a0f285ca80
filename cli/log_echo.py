"""Shows the errors in the children's log files as they appear, and keeps the files bounded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

MAX_LOG_BYTES = 64 << 20
"""A log that grew past this is emptied (its errors were shown)."""

_MAX_READ_BYTES = 256 << 10
_MAX_LINES_PER_POLL = 20
_MARKS = ("level=ERROR", "level=CRITICAL", '"level": "ERROR"', '"level": "CRITICAL"')


class LogEcho:
    """Follows one log file; ``poll()`` shows what is new and severe."""

    def __init__(self, path: Path, name: str, show: Callable[[str], None]) -> None:
        self._path = path
        self._name = name
        self._show = show
        self._offset = 0
        self._partial = b""

    def poll(self) -> None:
        """Read what was written since the last call."""
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return
        if size < self._offset:
            self._offset, self._partial = 0, b""
        # After a burst, the oldest part is not worth showing.
        if size - self._offset > _MAX_READ_BYTES:
            self._offset, self._partial = size - _MAX_READ_BYTES, b""
        with self._path.open("rb") as log:
            log.seek(self._offset)
            data = self._partial + log.read(_MAX_READ_BYTES)
            self._offset = log.tell()
        *lines, self._partial = data.split(b"\n")
        severe = [t for t in (_text(line) for line in lines) if any(m in t for m in _MARKS)]
        for text in severe[:_MAX_LINES_PER_POLL]:
            self._show(f"[{self._name}] {text}")
        if len(severe) > _MAX_LINES_PER_POLL:
            self._show(f"[{self._name}] … and {len(severe) - _MAX_LINES_PER_POLL} more errors")
        if self._offset > MAX_LOG_BYTES:
            # The child appends, so it goes on at the new end.
            os.truncate(self._path, 0)
            self._offset, self._partial = 0, b""


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")
