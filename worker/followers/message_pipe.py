"""Typed messages between a process and a child it started, over a socket pair.

    frame:  u32 length (little-endian) | MessagePack of one Struct

The end of either process closes the pipe, which the other notices at once, however it ended.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

MAX_FRAME_BYTES = 32 << 20
"""A Grant of the largest kind, twice over."""
MAX_UNSENT_BYTES = 128 << 20
"""A peer that takes nothing is given up at this."""

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18

In = TypeVar("In", bound=msgspec.Struct)

_logger = logging.getLogger(__name__)


class MessagePipe(Generic[In]):
    """One end; owns the socket. Lives in one event loop."""

    def __init__(
        self,
        end: socket.socket,
        decoder: msgspec.msgpack.Decoder[In],
        on_message: Callable[[In], None],
        on_closed: Callable[[str], None],
    ) -> None:
        """Start to read.

        Args:
            end: a connected stream socket.
            decoder: of the messages that the other end sends.
            on_message: called with each.
            on_closed: called once with the reason, unless it was ``close`` that closed it.
        """
        end.setblocking(False)
        self._socket = end
        self._decoder = decoder
        self._on_message = on_message
        self._on_closed = on_closed
        self._encoder = msgspec.msgpack.Encoder()
        self._received = bytearray()
        self._unsent: deque[memoryview] = deque()
        self._num_unsent = 0
        self._is_open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(end.fileno(), self._read)

    def send(self, message: msgspec.Struct) -> bool:
        """Queue a message; False once the pipe is closed.

        Raises:
            ValueError: the message is over ``MAX_FRAME_BYTES``.
        """
        if not self._is_open:
            return False
        data = self._encoder.encode(message)
        if len(data) > MAX_FRAME_BYTES:
            raise ValueError(f"{type(message).__name__} of {len(data)} bytes is over the cap")
        was_idle = not self._unsent
        for part in (_LENGTH.pack(len(data)), data):
            self._unsent.append(memoryview(part))
            self._num_unsent += len(part)
        if was_idle:
            self._write()
        if self._num_unsent > MAX_UNSENT_BYTES:
            self._end("the other end takes nothing")
        return self._is_open

    def close(self) -> None:
        """Close without calling ``on_closed``. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()

    def _end(self, reason: str) -> None:
        if self._is_open:
            self.close()
            self._on_closed(reason)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(str(error))
            return
        if not data:
            self._end("the other end is gone")
            return
        self._received += data
        try:
            messages = self._take_whole()
        except (msgspec.DecodeError, ValueError) as error:
            self._end(f"not a valid message: {error}")
            return
        for message in messages:
            self._on_message(message)

    def _take_whole(self) -> list[In]:
        """The messages that have come whole."""
        messages, at = [], 0
        while len(self._received) >= at + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, at)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            stop = at + _LENGTH.size + length
            if len(self._received) < stop:
                break
            messages.append(self._decoder.decode(bytes(self._received[at + _LENGTH.size : stop])))
            at = stop
        del self._received[:at]
        return messages

    def _write(self) -> None:
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent[0])
                self._num_unsent -= sent
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                    break
                self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            # From the loop: whoever sends must not be called back in the middle of it.
            self._loop.call_soon(self._end, str(error))
            return
        if self._unsent:
            self._loop.add_writer(self._socket.fileno(), self._write)
        else:
            self._loop.remove_writer(self._socket.fileno())
