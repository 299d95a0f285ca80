"""The data plane over plain TCP sockets: where NIXL is not installed, or by choice.

Received bytes go from the socket straight into granted blocks.
"""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Sequence

import msgspec

from kvtransfer.errors import BadAddress, TransportError, Unreachable
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.memory.segments import SMALL_BYTES, SegmentSize, digest_segments, spans
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
from kvtransfer.transports.socket.receive_connection import Digests, ReceiveConnection

NAME = "tcp"
_BACKLOG = 128


class TcpEndpointName(msgspec.Struct, frozen=True, array_like=True):
    """The endpoint bytes inside a data-plane address."""

    host: str
    port: int
    token: bytes


class TcpReceiveConnection(ReceiveConnection):
    """Reads a frame's bytes into the granted segments."""

    num_id_lists = 1

    def _body(self, ids: tuple[int, ...], size: SegmentSize) -> deque[memoryview]:
        pool = self._memory.buffer
        return deque(pool[start : start + length] for start, length in spans(ids, size))

    def _take_in(
        self, ids: tuple[int, ...], sources: tuple[int, ...], size: SegmentSize
    ) -> tuple[int, Digests]:
        """The bytes are in place; they are checked while the next frame is read."""
        if size.num_bytes < SMALL_BYTES:
            return 0, None
        return 0, self._helper.submit(digest_segments, self._memory.array, ids, size)


class TcpConnection(SocketConnection):
    """Sends the segments' bytes from where they lie."""

    chunk_bytes = 4 << 20
    """The receiver checks one chunk while it reads the next one."""

    def __init__(
        self, memory: BlockMemory, selector: selectors.BaseSelector, name: TcpEndpointName
    ) -> None:
        """Start connecting.

        Raises:
            Unreachable: the host's address is not usable.
        """
        try:
            family, _, _, _, address = socket.getaddrinfo(
                name.host, name.port, type=socket.SOCK_STREAM
            )[0]
        except OSError as error:
            raise Unreachable(f"{name.host}: {error}") from error
        greeting = GREETING.pack(MAGIC, FRAME_VERSION, name.token)
        super().__init__(memory, selector, family, address, greeting)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _put_frame(
        self,
        outgoing: deque[memoryview],
        local_ids: Sequence[int],
        remote_ids: Sequence[int],
        header: bytes,
        size: SegmentSize,
    ) -> None:
        outgoing.append(memoryview(pack_frame_head(header, size, remote_ids)))
        pool = self._memory.buffer
        outgoing.extend(pool[start : start + length] for start, length in spans(local_ids, size))


class TcpTransport(SocketTransport):
    """See the module."""

    name = NAME
    accepted_type = TcpReceiveConnection

    def __init__(
        self, memory: BlockMemory, *, host: str = "127.0.0.1", advertise_host: str = ""
    ) -> None:
        """Listen on a free port of ``host``.

        Raises:
            TransportError: the address can't be bound, or the pool is device memory.
        """
        if not memory.is_host:
            raise TransportError("transport 'tcp' needs the KV pool in host memory")
        try:
            listener = socket.create_server((host, 0), backlog=_BACKLOG)
        except OSError as error:
            raise TransportError(f"can't listen on {host}: {error}") from error
        # Accepted sockets inherit it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().__init__(memory, listener)
        self._host = advertise_host or host
        self._port: int = listener.getsockname()[1]

    def _address(self, token: bytes) -> bytes:
        name = msgspec.msgpack.encode(TcpEndpointName(self._host, self._port, token))
        return pack_address(NAME, self.memory, 0, name)

    def connect(self, peer_id: str, address: bytes) -> Connection:
        to = unpack_address(address, transport=NAME)
        try:
            name = msgspec.msgpack.decode(to.endpoint, type=TcpEndpointName)
        except msgspec.DecodeError as error:
            raise BadAddress(f"not a tcp endpoint: {error}") from error
        if not 0 < name.port < 65536 or len(name.token) != TOKEN_BYTES or len(name.host) > 255:
            raise BadAddress("a tcp endpoint field is out of range")
        return self._keep(TcpConnection(self.memory, self._connecting, name))
