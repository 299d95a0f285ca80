"""The dialing end of a data connection: frames out, receipts in."""

from __future__ import annotations

import errno
import os
import selectors
import socket
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

from kvtransfer.errors import PeerLost, TransportError, Unreachable
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.memory.segments import SegmentSize
from kvtransfer.transports.base import MAX_HEADER_BYTES, Connection, Write
from kvtransfer.transports.socket.frame import RECEIPT

_CONNECTING = (errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EALREADY)
_MAX_IOVECS = 64


class SocketWrite(Write):
    """Done when the receiver's receipt says that it has the whole frame."""

    def __init__(self, connection: SocketConnection, number: int) -> None:
        self._connection = connection
        self._number = number

    def poll(self) -> bool:
        connection = self._connection
        if connection.num_received + 1 == self._number:
            connection.advance()  # for all that wait behind this one, too
        elif connection.num_received < self._number and connection.is_closed:
            raise PeerLost("the connection is closed")
        return connection.num_received >= self._number


class SocketConnection(Connection):
    """One socket to one endpoint; connects in the background of ``advance``."""

    def __init__(
        self,
        memory: BlockMemory,
        selector: selectors.BaseSelector,
        family: int,
        address: Any,
        greeting: bytes,
    ) -> None:
        """Start connecting; registered with ``selector`` until it is closed.

        Raises:
            Unreachable: the peer can't be dialed.
        """
        self.num_received = 0
        """Frames the receiver has read."""
        self.is_closed = False
        self._memory = memory
        self._num_written = 0
        self._receipts = bytearray()
        self._outgoing: deque[memoryview] = deque([memoryview(greeting)])
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        code = self._socket.connect_ex(address)
        self._is_connecting = code != 0
        if code not in (0, *_CONNECTING):
            self._socket.close()
            raise Unreachable(f"the data endpoint: {os.strerror(code)}")
        self._selector = selector
        self._events = selectors.EVENT_READ | selectors.EVENT_WRITE
        selector.register(self._socket, self._events, self)

    def write(
        self, local_ids: Sequence[int], remote_ids: Sequence[int], header: bytes, size: SegmentSize
    ) -> Write:
        if self.is_closed:
            raise PeerLost("the connection is closed")
        if len(header) > MAX_HEADER_BYTES:
            raise TransportError("the header is over the cap")
        self._put_frame(self._outgoing, local_ids, remote_ids, header, size)
        self._num_written += 1
        return SocketWrite(self, self._num_written)

    @abstractmethod
    def _put_frame(
        self,
        outgoing: deque[memoryview],
        local_ids: Sequence[int],
        remote_ids: Sequence[int],
        header: bytes,
        size: SegmentSize,
    ) -> None:
        """Append one frame's bytes."""

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
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        if events != self._events:
            self._events = events
            self._selector.modify(self._socket, events, self)

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._outgoing.clear()
        self._selector.unregister(self._socket)
        self._socket.close()

    def _send(self) -> None:
        if self._is_connecting:
            code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self.close()
                raise Unreachable(f"the data endpoint: {os.strerror(code)}")
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
        raise PeerLost(f"data connection: {why}")
