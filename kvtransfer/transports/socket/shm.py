"""The data plane between workers of one host: the receiver copies out of the sender's pool.

The sender hands its pool over as a file (memfd) through a Unix socket; the receiver maps it
read-only and, for every frame, copies the named segments into its own. So a write costs one memcpy,
and it is the receiver that makes it: a sender that is frozen, dead or fenced can't touch anything.
A sender that frees blocks it had offered (it closes the connection first) makes the receiver's
check of the chunk fail, and its PrefillDone never comes.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import selectors
import socket
import struct
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from kvtransfer.errors import BadAddress, PeerLost, TransportError, Unreachable
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.memory.segments import (
    SMALL_BYTES,
    Bytes,
    SegmentSize,
    copy_segments,
    digest_segments,
)
from kvtransfer.transports.address import pack_address, unpack_address
from kvtransfer.transports.base import Connection
from kvtransfer.transports.socket.base import SocketTransport
from kvtransfer.transports.socket.dial import SocketConnection
from kvtransfer.transports.socket.frame import (
    FRAME_VERSION,
    GREETING,
    MAGIC,
    TOKEN_BYTES,
    pack_frame_head,
)
from kvtransfer.transports.socket.receive_connection import Digests, ReceiveConnection, Refused
from mesh.shared_mapping import is_sealed

NAME = "shm"
_BACKLOG = 128
_SHARED_BYTES = 4 << 20
"""From here on two threads copy a frame."""
_PEER_CREDENTIALS = struct.Struct("3i")


def host_id() -> str:
    """Equal for processes that can reach each other over ``shm``; empty where none can.

    One boot of one kernel, one network namespace (the socket's name lives there), one user.
    """
    if sys.platform != "linux":
        return ""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        return ""
    text = f"{boot_id} {namespace} {os.getuid()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class ShmEndpointName(msgspec.Struct, frozen=True, array_like=True):
    """The endpoint bytes inside a data-plane address."""

    socket: str
    """In Linux's abstract namespace, without the leading NUL."""
    token: bytes


class ShmReceiveConnection(ReceiveConnection):
    """Copies the named segments out of the sender's pool, which came with the greeting."""

    num_id_lists = 2
    _pool: Bytes | None = None
    _mapping: mmap.mmap | None = None

    def close(self) -> None:
        super().close()
        self._pool = None
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None

    def _read(self) -> int:
        if self._mapping is not None:
            return super()._read()
        data, fds, _, _ = socket.recv_fds(self.socket, len(self._targets[0]), 1)
        try:
            if len(data) != len(self._targets[0]) or len(fds) != 1:
                if not data:
                    self.is_closed = True
                    return 0
                raise Refused("a greeting without the sender's pool")
            self._map(fds[0])
        finally:
            for fd in fds:
                os.close(fd)
        self._targets[0][:] = data
        self._advance(len(data))
        return len(data)

    def _map(self, fd: int) -> None:
        if not is_sealed(fd):
            raise Refused("the sender's pool could shrink")
        try:
            self._mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise Refused(f"the sender's pool can't be mapped: {error}") from error
        self._pool = np.frombuffer(self._mapping, np.uint8)

    def _take_in(
        self, ids: tuple[int, ...], sources: tuple[int, ...], size: SegmentSize
    ) -> tuple[int, Digests]:
        """Copy on two cores, and check each segment while it is in the cache."""
        assert self._pool is not None
        if (max(sources) + 1) * size.stride > len(self._pool):
            raise Refused("a source segment is outside the sender's pool")
        num_bytes = len(ids) * size.num_bytes
        target = self._memory.array
        if size.num_bytes < SMALL_BYTES:
            copy_segments(self._pool, sources, target, ids, size)
            return num_bytes, None
        half = len(ids) // 2 if num_bytes >= _SHARED_BYTES else 0
        other = None
        if half:
            other = self._helper.submit(
                _copy_and_digest, self._pool, sources[:half], target, ids[:half], size
            )
        digests = _copy_and_digest(self._pool, sources[half:], target, ids[half:], size)
        if other is not None:
            digests = other.result() + digests
        return num_bytes, digests


class ShmConnection(SocketConnection):
    """Tells which segments to take; the receiver takes them."""

    chunk_bytes = 16 << 20
    """About 1 ms of copying on two cores; smaller ones lose a tenth of it to waking the second."""

    def __init__(
        self, memory: BlockMemory, selector: selectors.BaseSelector, name: ShmEndpointName
    ) -> None:
        """Connect and hand the pool over.

        Raises:
            TransportError: the pool is not in a shared mapping.
            Unreachable: the receiver is not on this host, or not this user's.
        """
        if memory.mapping is None or memory.mapping.fd < 0:
            raise TransportError("transport 'shm' needs the KV pool in a shared mapping")
        greeting = GREETING.pack(MAGIC, FRAME_VERSION, name.token)
        super().__init__(memory, selector, socket.AF_UNIX, f"\0{name.socket}", greeting)
        if not _is_own_user(self._socket):
            self.close()
            raise Unreachable("the data endpoint belongs to another user")
        try:
            socket.send_fds(self._socket, [self._outgoing.popleft()], [memory.mapping.fd])
        except OSError as error:
            self.close()
            raise PeerLost(f"data connection: {error}") from error

    def _put_frame(
        self,
        outgoing: deque[memoryview],
        local_ids: Sequence[int],
        remote_ids: Sequence[int],
        header: bytes,
        size: SegmentSize,
    ) -> None:
        outgoing.append(memoryview(pack_frame_head(header, size, remote_ids, local_ids)))


class ShmTransport(SocketTransport):
    """See the module. Linux and host memory only."""

    name = NAME
    accepted_type = ShmReceiveConnection

    def __init__(self, memory: BlockMemory) -> None:
        """Listen on a socket without a file.

        Raises:
            TransportError: not Linux, or the pool is device memory.
        """
        if not memory.is_host or not host_id():
            raise TransportError("transport 'shm' needs Linux and the KV pool in host memory")
        self._socket_name = f"pdmesh-kv-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{self._socket_name}")
        listener.listen(_BACKLOG)
        super().__init__(memory, listener)

    def _address(self, token: bytes) -> bytes:
        name = msgspec.msgpack.encode(ShmEndpointName(self._socket_name, token))
        return pack_address(NAME, self.memory, 0, name)

    def connect(self, peer_id: str, address: bytes) -> Connection:
        to = unpack_address(address, transport=NAME)
        try:
            name = msgspec.msgpack.decode(to.endpoint, type=ShmEndpointName)
        except msgspec.DecodeError as error:
            raise BadAddress(f"not a shm endpoint: {error}") from error
        if not 0 < len(name.socket) <= 64 or len(name.token) != TOKEN_BYTES:
            raise BadAddress("a shm endpoint field is out of range")
        return self._keep(ShmConnection(self.memory, self._connecting, name))

    def _is_welcome(self, accepted: socket.socket) -> bool:
        return _is_own_user(accepted)


def _is_own_user(connected: socket.socket) -> bool:
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return bool(_PEER_CREDENTIALS.unpack(data)[1] == os.getuid())


def _copy_and_digest(
    source: Bytes, source_ids: Sequence[int], target: Bytes, target_ids: Sequence[int],
    size: SegmentSize,
) -> list[int]:  # fmt: skip
    digests: list[int] = []
    for from_id, to_id in zip(source_ids, target_ids, strict=True):
        copy_segments(source, (from_id,), target, (to_id,), size)
        digests += digest_segments(target, (to_id,), size)
    return digests
