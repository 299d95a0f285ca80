"""What ``tcp`` and ``shm`` share: a listener, endpoints named by tokens, and their connections.

A random token in each granted address says which peer's endpoint a connection belongs to. What is
written outside the peer's grants closes the connection. Everything is non-blocking and moves only
in ``poll``; every write is executed by this process, so a fence is closing sockets.
"""

from __future__ import annotations

import secrets
import selectors
import socket
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from kvtransfer.errors import PeerLost
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.transports.base import Arrival, Transport
from kvtransfer.transports.socket.dial import SocketConnection
from kvtransfer.transports.socket.frame import TOKEN_BYTES
from kvtransfer.transports.socket.receive_connection import Endpoint, Frame, ReceiveConnection

MAX_ACCEPTED = 1024
MAX_POLL_BYTES = 32 << 20
"""Received per poll, so that the control loop gets its turn."""


_SELECTORS_WITH_FILE = tuple(
    getattr(selectors, name)
    for name in ("EpollSelector", "KqueueSelector", "DevpollSelector")
    if hasattr(selectors, name)
)


class SocketTransport(Transport):
    """Host memory only."""

    accepted_type: type[ReceiveConnection]

    def __init__(self, memory: BlockMemory, listener: socket.socket) -> None:
        self.memory = memory
        self._endpoints: dict[str, Endpoint] = {}
        self._connections: list[SocketConnection] = []
        self._selector = selectors.DefaultSelector()
        self._connecting = selectors.DefaultSelector()
        """Of the connections this side dialed."""
        self._num_accepted = 0
        self._checking: deque[Frame] = deque()
        """Read whole; their digests may be still to come."""
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="kv-check")
        self._listener = listener
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)

    def open_endpoint(self, peer_id: str) -> bytes:
        endpoint = self._endpoints.get(peer_id)
        if endpoint is None:
            token = secrets.token_bytes(TOKEN_BYTES)
            endpoint = Endpoint(peer_id, token, self.memory.block_bytes)
            self._endpoints[peer_id] = endpoint
        return self._address(endpoint.token)

    @abstractmethod
    def _address(self, token: bytes) -> bytes:
        """What a sender with this token dials."""

    def grant_writes(self, peer_id: str, block_ids: Sequence[int]) -> None:
        self._endpoints[peer_id].write_grants.grant_writes(block_ids)

    def revoke_writes(self, peer_id: str, block_ids: Sequence[int]) -> None:
        endpoint = self._endpoints.get(peer_id)
        if endpoint is not None:
            endpoint.write_grants.revoke_writes(block_ids)
            for connection in [i for i in endpoint.connections if i.is_writing(block_ids)]:
                self._drop(connection)

    def poll_arrivals(self) -> list[Arrival]:
        frames: list[Frame] = []
        budget = MAX_POLL_BYTES
        for key, _ in self._selector.select(timeout=0):
            if key.data is None:
                self._accept()
            elif budget > 0:
                connection: ReceiveConnection = key.data
                budget -= connection.receive(frames, budget)
                if connection.is_closed:
                    self._drop(connection)
        self._checking.extend(frames)
        arrivals: list[Arrival] = []
        while self._checking:
            digests = self._checking[0].digests
            if isinstance(digests, Future):
                if not digests.done() and (arrivals or budget < MAX_POLL_BYTES):
                    break  # there was something else to do meanwhile, and may be again
                digests = digests.result()
            frame = self._checking.popleft()
            arrivals.append(Arrival(frame.peer_id, frame.header, digests))
        return arrivals

    def poll_connections(self) -> None:
        for key, _ in self._connecting.select(timeout=0):
            connection: SocketConnection = key.data
            with suppress(PeerLost):  # whose writes find out by their own polls
                connection.advance()

    def arrivals_fileno(self) -> int | None:
        return selector_fileno(self._selector)

    def connections_fileno(self) -> int | None:
        return selector_fileno(self._connecting)

    def fence(self, peer_id: str) -> bool:
        endpoint = self._endpoints.pop(peer_id, None)
        self._checking = deque(frame for frame in self._checking if frame.peer_id != peer_id)
        if endpoint is not None:
            for connection in list(endpoint.connections):
                self._drop(connection)
        return True

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for key in list(self._selector.get_map().values()) if self._selector.get_map() else []:
            if key.data is not None:
                self._drop(key.data)
        self._endpoints.clear()
        self._listener.close()
        self._selector.close()
        self._connecting.close()
        self._helper.shutdown()

    def _keep(self, connection: SocketConnection) -> SocketConnection:
        self._connections = [c for c in self._connections if not c.is_closed]
        self._connections.append(connection)
        return connection

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return  # the dialer gave up meanwhile
        if self._num_accepted >= MAX_ACCEPTED or not self._is_welcome(accepted):
            accepted.close()
            return
        connection = self.accepted_type(accepted, self.memory, self._find_endpoint, self._helper)
        self._num_accepted += 1
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _is_welcome(self, accepted: socket.socket) -> bool:
        """Whether this dialer may speak at all."""
        return True

    def _find_endpoint(self, token: bytes) -> Endpoint | None:
        for endpoint in self._endpoints.values():
            if secrets.compare_digest(endpoint.token, token):
                return endpoint
        return None

    def _drop(self, connection: ReceiveConnection) -> None:
        self._selector.unregister(connection.socket)
        connection.close()
        self._num_accepted -= 1


def selector_fileno(selector: selectors.BaseSelector) -> int | None:
    """Selectors that are files (epoll, kqueue) can be waited for like one."""
    if isinstance(selector, _SELECTORS_WITH_FILE):
        fileno: int = selector.fileno()
        return fileno
    return None
