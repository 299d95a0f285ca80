"""Tells while a cluster starts which kernels its workers compile, as their logs say it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cli.child_process import ChildProcess
from cli.progress import Progress

_NUM_LINES = 20
_STATE = re.compile(r"(compiling|compiled) kernels for [^\"]*")
"""Of a record in either log format, up to its end or the quote after it."""


class KernelProgress:
    """Shows every change once; ``poll`` it until the cluster is ready."""

    def __init__(self, workers: Sequence[ChildProcess]) -> None:
        self._workers = workers
        self._shown: dict[str, str] = {}

    def poll(self, progress: Progress) -> str:
        """Show what is new; returns what is compiled now, "" for nothing."""
        pending = ""
        for child in self._workers:
            found = [_STATE.search(line) for line in child.last_log_lines(_NUM_LINES)]
            states = [match for match in found if match is not None]
            if not states:
                continue
            name, text = child.spec.name, states[-1][0].strip()
            if self._shown.get(name) != text:
                self._shown[name] = text
                progress.step(f"{name}: {text}")
            # One waits for the other: the one that says what for is of interest.
            if states[-1][1] == "compiling" and (not pending or "waiting" in pending):
                pending = text
        return pending
