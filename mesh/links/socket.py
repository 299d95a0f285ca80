"""One non-blocking ZMQ socket and its connection monitor, driven by the asyncio loop.

``zmq.asyncio`` makes a future for every message; control links carry one message per engine step
and peer, so they read the raw socket instead. A ZMQ descriptor is edge-triggered: any call on the
socket may swallow the edge, hence the check for pending input after each send.

Sockets belong to the loop's thread; nothing here blocks.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq

from mesh.codec import MAX_MESSAGE_BYTES

HIGH_WATER_MARK = 1024
"""Messages queued per peer and direction before ``send`` says no."""

_MAX_MESSAGES_PER_TURN = 256
"""Then other callbacks of the loop get their turn."""

_MONITORED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_EVENT_FORMAT = struct.Struct("=HI")
_monitor_numbers = itertools.count()


class SocketEvent(NamedTuple):
    """A connection came (``EVENT_ACCEPTED``), broke (``_DISCONNECTED``) or failed (``_CLOSED``)."""

    kind: int
    fd: int
    """Descriptor of the connection; the number is reused by later connections."""


class LinkSocket:
    """Owns a ROUTER or DEALER socket and its monitor; ``close()`` frees both."""

    def __init__(
        self,
        kind: int,
        *,
        on_frames: Callable[[Sequence[zmq.Frame]], None],
        on_event: Callable[[SocketEvent], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_frames = on_frames
        self._on_event = on_event
        self._events: deque[SocketEvent] = deque()
        self._pump_scheduled = False
        self.closed = False
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        socket: zmq.Socket[bytes] = context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        # A link is to one start of a peer: after a break the owner dials anew or goes elsewhere.
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket = socket
        monitor_address = f"inproc://pdmesh-monitor-{next(_monitor_numbers)}"
        socket.monitor(monitor_address, _MONITORED)
        self._monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.connect(monitor_address)
        self._fds = (int(socket.getsockopt(zmq.FD)), int(self._monitor.getsockopt(zmq.FD)))
        self._loop.add_reader(self._fds[0], self._pump)
        self._loop.add_reader(self._fds[1], self._handle_events)
        # A ZMQ descriptor announces nothing before a first read has found the socket empty.
        self._loop.call_soon(self._handle_events)
        self._loop.call_soon(self._pump)

    def bind(self, address: str) -> str:
        """Bind and return the real address, the port resolved where ``address`` ends in ``:0``.

        Raises:
            zmq.ZMQError: the address is taken or malformed.
        """
        self._socket.bind(address)
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, address: str) -> None:
        """Start connecting; the outcome arrives as messages or as an event.

        Raises:
            zmq.ZMQError: the address is malformed.
        """
        self._socket.connect(address)

    def send(self, frames: Sequence[bytes]) -> bool:
        """Queue one message; False when the peer is gone or its queue is full."""
        if self.closed:
            return False
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        finally:
            self._schedule_pump()
        return True

    def pump(self) -> None:
        """Deliver everything that has already arrived."""
        while self._deliver(HIGH_WATER_MARK) == HIGH_WATER_MARK:
            pass

    def forget_events_before_accept(self, fd: int) -> bool:
        """Drop events of earlier connections with this descriptor, up to its last accept.

        To be called before ``fd`` is remembered as a new connection. Returns whether a break of
        an earlier connection was among them.
        """
        self._read_events()
        accepts = [i for i, e in enumerate(self._events) if e == (zmq.EVENT_ACCEPTED, fd)]
        if not accepts:
            return False
        earlier = [e for e in list(self._events)[: accepts[-1]] if e.fd == fd]
        later = [e for i, e in enumerate(self._events) if e.fd != fd or i > accepts[-1]]
        self._events = deque(later)
        return any(e.kind == zmq.EVENT_DISCONNECTED for e in earlier)

    def close(self) -> None:
        """Close the socket and the monitor; messages not yet sent are dropped. Idempotent."""
        if self.closed:
            return
        self.closed = True
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def _schedule_pump(self) -> None:
        if self.closed or self._pump_scheduled:
            return
        # Reading EVENTS also makes the socket process what its descriptor announced.
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_scheduled = False
        self._deliver(_MAX_MESSAGES_PER_TURN)
        self._schedule_pump()

    def _deliver(self, max_messages: int) -> int:
        for num_delivered in range(max_messages):
            if self.closed:
                return num_delivered
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return num_delivered
            self._on_frames(frames)
        return max_messages

    def _handle_events(self) -> None:
        self._read_events()
        # What a connection delivered before it broke is still queued, and goes first.
        if self._events:
            self.pump()
        while self._events and not self.closed:
            self._on_event(self._events.popleft())

    def _read_events(self) -> None:
        while not self.closed:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._events.append(SocketEvent(*_EVENT_FORMAT.unpack(frames[0])))
