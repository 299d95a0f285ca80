"""The dialing half of the TCP data plane: frames out, receipts in."""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Sequence

from kvtransfer.errors import PeerLost, TransportError
from kvtransfer.pool import BlockMemory
from kvtransfer.tcp_frame import GREETING, MAGIC, RECEIPT, TCP_VERSION, pack_frame_head
from kvtransfer.transport import MAX_HEADER_BYTES, Connection, Write

_CONNECTING = (errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EALREADY)
_MAX_IOVECS = 64


class TcpWrite(Write):
    """Done when the receiver's receipt says that it has read the whole frame."""

    def __init__(self, connection: TcpConnection, number: int) -> None:
        self._connection = connection
        self._number = number

    def poll(self) -> bool:
        if self._connection.num_received < self._number:
            self._connection.advance()
        return self._connection.num_received >= self._number


class TcpConnection(Connection):
    """One socket to one endpoint; connects in the background of ``advance``."""

    def __init__(self, memory: BlockMemory, host: str, port: int, token: bytes) -> None:
        """Start connecting.

        Raises:
            TransportError: the host's address is not usable.
        """
        self.num_received = 0
        """Frames the receiver has read."""
        self.is_closed = False
        self._memory = memory
        self._num_written = 0
        self._receipts = bytearray()
        greeting = GREETING.pack(MAGIC, TCP_VERSION, token)
        self._outgoing: deque[memoryview] = deque([memoryview(greeting)])
        try:
            family, kind, proto, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )[0]
            self._socket = socket.socket(family, kind, proto)
        except OSError as error:
            raise TransportError(f"can't reach {host}: {error}") from error
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = self._socket.connect_ex(address)
        self._is_connecting = code != 0
        if code not in (0, *_CONNECTING):
            self._lose(os.strerror(code))

    def write(self, local_ids: Sequence[int], remote_ids: Sequence[int], header: bytes) -> Write:
        if self.is_closed:
            raise PeerLost("the connection is closed")
        if len(header) > MAX_HEADER_BYTES:
            raise TransportError("the header is over the cap")
        self._outgoing.append(memoryview(pack_frame_head(header, remote_ids)))
        self._outgoing.extend(self._memory.block(block_id) for block_id in local_ids)
        self._num_written += 1
        return TcpWrite(self, self._num_written)

    def advance(self) -> None:
        """Send and read what the socket takes and gives.

        Raises:
            PeerLost: the connection is gone.
        """
        if self.is_closed:
            raise PeerLost("the connection is closed")
        try:
            self._send()
            self._read_receipts()
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(str(error))

    def close(self) -> None:
        self.is_closed = True
        self._outgoing.clear()
        self._socket.close()

    def _send(self) -> None:
        if self._is_connecting:
            code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._lose(os.strerror(code))
            self._is_connecting = False
        while self._outgoing:
            parts = [self._outgoing[i] for i in range(min(_MAX_IOVECS, len(self._outgoing)))]
            try:
                sent = self._socket.sendmsg(parts)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ENOTCONN:
                    return  # still connecting
                raise
            self._drop_sent(sent)

    def _drop_sent(self, sent: int) -> None:
        while sent:
            head = self._outgoing[0]
            if sent < len(head):
                self._outgoing[0] = head[sent:]
                return
            sent -= len(head)
            self._outgoing.popleft()

    def _read_receipts(self) -> None:
        while True:
            try:
                data = self._socket.recv(4096)
            except OSError as error:
                if error.errno == errno.ENOTCONN:
                    return
                raise
            if not data:
                self._lose("closed by the receiver")
            self._receipts += data
            whole = len(self._receipts) // RECEIPT.size * RECEIPT.size
            if whole:
                (count,) = RECEIPT.unpack_from(self._receipts, whole - RECEIPT.size)
                if not self.num_received <= count <= self._num_written:
                    self._lose("a receipt for what was not sent")
                self.num_received = count
                del self._receipts[:whole]

    def _lose(self, why: str) -> None:
        self.close()
        raise PeerLost(f"tcp data connection: {why}")
