"""A second mapping of shared memory that can be cut off for good.

Why: on one host UCX writes with ``process_vm_writev`` (CMA). The kernel needs no cooperation of the
target for it, so destroying the target's agent does NOT stop a sender that was frozen inside a
write: measured, 409 of 512 MiB arrived after the agent was gone. Every sender peer therefore gets
the pool under an address range of its own, and fencing that peer makes the range inaccessible:

    pool (what the model uses)   0x7f10…  ───┐
    alias given to sender A      0x7f50…  ───┼── the same pages
    alias given to sender B      0x7f90…  ───┘      fence(B): PROT_NONE over 0x7f90…

The range stays reserved after the cut: a later mapping there would receive the late bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

_MREMAP_MAYMOVE = 1
_PROT_NONE = 0
_MAP_PRIVATE = 0x02
_MAP_FIXED = 0x10
_MAP_ANONYMOUS = 0x20
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mremap.restype = ctypes.c_void_p
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


class MemoryAlias:
    """One alias of a shared mapping. Owned by whoever made it, who calls ``cut`` or ``unmap``."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.address = address
        self.num_bytes = num_bytes
        self._is_cut = False

    def cut(self) -> None:
        """Make the range inaccessible to everyone and keep it reserved. Idempotent.

        Raises:
            OSError: the kernel refused; the range is then still writable.
        """
        if self._is_cut:
            return
        flags = _MAP_PRIVATE | _MAP_FIXED | _MAP_ANONYMOUS | _MAP_NORESERVE
        result = _libc().mmap(self.address, self.num_bytes, _PROT_NONE, flags, -1, 0)
        if result == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "could not cut a memory alias")
        self._is_cut = True

    def unmap(self) -> None:
        """Give the range back; only where no peer could ever write to it."""
        _libc().munmap(self.address, self.num_bytes)
        self._is_cut = True


def map_alias(address: int, num_bytes: int) -> MemoryAlias | None:
    """Map ``[address, address + num_bytes)`` a second time.

    Returns:
        None where the memory is not a page-aligned shared mapping, or the system is not Linux.
    """
    if sys.platform != "linux" or address % mmap.PAGESIZE or num_bytes % mmap.PAGESIZE:
        return None
    # old_size 0 duplicates a shareable mapping (mremap(2)); private ones are refused with EINVAL.
    result = _libc().mremap(address, 0, num_bytes, _MREMAP_MAYMOVE)
    if result is None or result == _MAP_FAILED:
        return None
    return MemoryAlias(int(result), num_bytes)
