"""Zeroed memory that other processes of this host can map: an anonymous file that can't shrink.

The file has no name, so nothing is left behind by a process that dies. Its size is sealed: a peer
that maps it never gets SIGBUS from a truncation.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys

_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_F_SEAL_SHRINK = 0x2


class SharedMapping:
    """``memory`` backed by the open file ``fd``, -1 where the system has no such files.

    Lives as long as something refers to ``memory``; keep this object for as long as ``fd`` is used.
    """

    def __init__(self, num_bytes: int) -> None:
        """Map at least ``num_bytes``; pages are touched on first use only."""
        rounded = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = -1
        if sys.platform == "linux":
            self.fd = os.memfd_create("pdmesh-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, rounded)
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_SHRINK)
        self.memory = mmap.mmap(self.fd, rounded)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def is_sealed(fd: int) -> bool:
    """Whether a file handed over by a peer can't shrink under a mapping of it."""
    try:
        return bool(fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK)
    except OSError:
        return False  # not such a file
