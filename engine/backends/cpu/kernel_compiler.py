"""Compiles kernels beside the loading of a model: once for all workers that share a cache.

    the stamp is there ─────────────────────────────────────────▶ nothing to do
    the lock is free ───▶ own processes compile ── all well ──▶ stamp ──▶ unlock
                                   └────────────── one fails ──▶ unlock, whoever computes compiles
    the lock is held ───▶ another worker does that: look again

A worker's own process then loads kernels from numba's cache, as it does at every later start. What
is missing there, for whatever reason, numba compiles when it is first called.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import llvmlite
import numba
from numba.core.registry import cpu_target

from engine.backend import KVDtype
from engine.backends.cpu import CACHE_FOLDER, SOURCES
from engine.backends.cpu.backend import WeightScheme
from engine.backends.cpu.kernel_calls import PARTS, kernel_calls
from engine.backends.cpu.level import LEVEL
from mesh import parent_watch

_LOCK_NAME = "compiling"
_LONGEST_S = 1800.0
"""Then a worker goes on without; a machine that slow has other troubles."""
_POLL_S = 0.1
_ROOT = Path(__file__).resolve().parents[3]

_logger = logging.getLogger(__name__)


class KernelCompiler:
    """A context, entered before the model is loaded; ``wait`` before the first kernel is called.

    Owns its processes, which die with the thread that enters at the latest.
    """

    def __init__(
        self, weights: WeightScheme, kv_dtype: KVDtype, folder: Path | None = CACHE_FOLDER
    ) -> None:
        """Prepare; ``folder`` is that of numba's cache, None: there is none that is known."""
        self._arguments = (weights, kv_dtype)
        self._folder = folder
        self._start_s = time.monotonic()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._follower: threading.Thread | None = None
        self._is_closed = False

    def __enter__(self) -> Self:
        self._settle()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def wait(self) -> None:
        """Until the kernels are in the cache, or it is clear that they will not be."""
        deadline_s = self._start_s + _LONGEST_S
        if not self._settle():
            _logger.info("compiling kernels for %s: waiting for another worker", LEVEL)
        while not self._settle() and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        if self._follower is not None:
            self._follower.join(max(0.0, deadline_s - time.monotonic()))
        self._stop()

    def _stop(self) -> None:
        """End what still compiles."""
        if self._follower is not None:
            self._is_closed = True
            for process in self._processes:
                process.kill()
            self._follower.join()

    def _settle(self) -> bool:
        """Start the processes if it is this worker's turn; whether no other worker has it."""
        if self._folder is None or self._follower is not None:
            return True
        stamp = self._folder / _stamp_name(*self._arguments)
        if stamp.exists():
            return True
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = (self._folder / _LOCK_NAME).open("ab")
        except OSError as error:
            _logger.warning("compiling kernels in this process: %s", error)
            self._folder = None
            return True
        with contextlib.ExitStack() as closing:
            closing.enter_context(lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if stamp.exists():
                return True
            lines = self._start()
            self._follower = threading.Thread(
                target=self._follow, args=(lines, lock, stamp), name="compiling", daemon=True
            )
            self._follower.start()
            closing.pop_all()  # the lock is the thread's now
        return True

    def _start(self) -> BinaryIO:
        """Start a process for each part; returns what they write, which ends when they do."""
        lines, end = os.pipe()
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        module = "engine.backends.cpu.compile_process"
        with open(end, "wb") as out:
            for part in PARTS:
                command = [sys.executable, "-P", "-m", module, part, *self._arguments]
                # Wrapped, so that they die with this process even while they import torch.
                watch = [sys.executable, parent_watch.__file__, str(os.getpid())]
                self._processes.append(
                    subprocess.Popen(
                        [*watch, *command],
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                    )
                )
        return open(lines, "rb")

    def _follow(self, lines: BinaryIO, lock: BinaryIO, stamp: Path) -> None:
        """Tell how far they are; when all have ended, leave the stamp and unlock."""
        total = sum(len(kernel_calls(part)) for part in PARTS)
        now: dict[str, str] = {}
        with lock, lines:
            for number, line in enumerate(lines, 1):
                part, _, name = line.decode().strip().partition(" ")
                now[part] = name
                _logger.info(
                    "compiling kernels for %s: %d of %d (%s), %.0f s",
                    LEVEL, number, total, ", ".join(now.values()), self._elapsed_s,
                )  # fmt: skip
            codes = [process.wait() for process in self._processes]
            if not any(codes):
                stamp.touch()
                _logger.info("compiled kernels for %s in %.0f s", LEVEL, self._elapsed_s)
            else:
                _logger.log(
                    logging.DEBUG if self._is_closed else logging.WARNING,
                    "compiling kernels ended with exit codes %s: what is missing is compiled here",
                    ", ".join(map(str, codes)),
                )  # fmt: skip

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._start_s


def _stamp_name(weights: WeightScheme, kv_dtype: KVDtype) -> str:
    """Of all that decides whether numba finds a kernel: machines may share a folder."""
    target = cpu_target.target_context.codegen().magic_tuple()
    versions = (SOURCES, numba.__version__, llvmlite.__version__, target)
    digest = hashlib.sha256(repr(versions).encode()).hexdigest()[:16]
    return f"compiled-{LEVEL}-{weights}-{kv_dtype}-{digest}"
