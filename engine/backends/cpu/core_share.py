"""Shares a machine's cores out to the workers on it that compute at the moment.

Workers with as many threads as cores each, computing at once, keep waiting for threads that another
worker's threads keep from running. Sharing costs less: each takes its part of the cores for as long
as others compute, and all of them when it computes alone.

Whoever computes holds a lock on one byte of a file that all workers have open; looking for locks on
the other bytes tells who else does. The kernel drops a dead worker's lock.

    byte      pid of a decode worker … | _ROLE_BYTES + pid of a prefill worker …
"""

from __future__ import annotations

import fcntl
import os
import struct

from mesh.errors import ConfigError
from mesh.worker_info import Role

_FLOCK = struct.Struct("hhqqi")  # type, whence, start, length, pid: fcntl(2)
_ROLE_BYTES = 1 << 24
_FIRST_BYTE: dict[Role, int] = {"decode": 0, "prefill": _ROLE_BYTES}


class CoreShare:
    """One worker's part of the cores it may use. For one thread; closed with the process."""

    def __init__(self, path: str, role: Role) -> None:
        """Join the workers that share ``path``; none if it is empty.

        Raises:
            ConfigError: the file cannot be opened.
        """
        self._num_cores = len(os.sched_getaffinity(0))
        self._first_byte = _FIRST_BYTE[role]
        self._held: int | None = None
        self._file: int | None = None
        if not path:
            return
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cores_file: {error}") from error

    def take(self) -> int:
        """Say that this worker computes, if it has not; returns how many cores are its own.

        What division leaves over goes to decode workers first: they are waited for at every token.
        """
        if self._file is None:
            return self._num_cores
        if self._held is None:
            self._held = self._lock_a_byte()
        others = self._locked_by_others(0, 2 * _ROLE_BYTES)
        each, left = divmod(self._num_cores, len(others) + 1)
        rank = sum(byte < self._held for byte in others)
        return max(1, each + (rank < left))

    def give_back(self) -> None:
        """Say that this worker computes no more."""
        if self._file is not None and self._held is not None:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._held)
            self._held = None

    def _lock_a_byte(self) -> int:
        assert self._file is not None
        byte = self._first_byte + os.getpid()
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except BlockingIOError:  # the same pid in another container
                byte += 1
            else:
                return byte

    def _locked_by_others(self, first: int, last: int) -> list[int]:
        """Bytes in ``first`` … ``last`` - 1 that others have locked."""
        assert self._file is not None
        if first >= last:
            return []
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, last - first, 0)
        kind, _, byte, _, _ = _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, wanted))
        if kind == fcntl.F_UNLCK:
            return []
        below = self._locked_by_others(first, byte)
        return [*below, byte, *self._locked_by_others(byte + 1, last)]
