"""The data plane over plain TCP sockets: the fallback where NIXL is not installed.

One listener per worker; a random token in each granted address says which peer's endpoint a
connection belongs to. Received bytes go from the socket straight into granted blocks; anything else
closes the connection. Everything is non-blocking and moves only in ``poll``.
"""

from __future__ import annotations

import secrets
import selectors
import socket
from collections.abc import Sequence

import msgspec

from kvtransfer.address import pack_address, unpack_address
from kvtransfer.errors import BadAddress, TransportError
from kvtransfer.pool import BlockMemory
from kvtransfer.tcp_frame import TOKEN_BYTES
from kvtransfer.tcp_receiving import TcpEndpoint, TcpInlet
from kvtransfer.tcp_sending import TcpConnection
from kvtransfer.transport import Arrival, Connection, Transport

NAME = "tcp"
MAX_INLETS = 1024
MAX_POLL_BYTES = 64 << 20
"""Received per poll, so that the control loop gets its turn."""
_BACKLOG = 128


class TcpEndpointName(msgspec.Struct, frozen=True, array_like=True):
    """The endpoint bytes inside a data-plane address."""

    host: str
    port: int
    token: bytes


class TcpTransport(Transport):
    """See the module. Host memory only."""

    name = NAME

    def __init__(
        self, memory: BlockMemory, *, host: str = "127.0.0.1", advertise_host: str = ""
    ) -> None:
        """Listen on a free port of ``host``.

        Raises:
            TransportError: the address can't be bound, or the pool is device memory.
        """
        if not memory.is_host:
            raise TransportError("transport 'tcp' needs the KV pool in host memory")
        self.memory = memory
        self._endpoints: dict[str, TcpEndpoint] = {}
        self._connections: list[TcpConnection] = []
        self._selector = selectors.DefaultSelector()
        self._num_inlets = 0
        try:
            self._listener = socket.create_server((host, 0), backlog=_BACKLOG)
        except OSError as error:
            raise TransportError(f"can't listen on {host}: {error}") from error
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._host = advertise_host or host
        self._port: int = self._listener.getsockname()[1]

    def open_endpoint(self, peer_id: str) -> bytes:
        endpoint = self._endpoints.get(peer_id)
        if endpoint is None:
            token = secrets.token_bytes(TOKEN_BYTES)
            endpoint = self._endpoints[peer_id] = TcpEndpoint(peer_id, token)
        name = msgspec.msgpack.encode(TcpEndpointName(self._host, self._port, endpoint.token))
        return pack_address(NAME, self.memory, 0, name)

    def permit(self, peer_id: str, block_ids: Sequence[int]) -> None:
        self._endpoints[peer_id].permitted.update(block_ids)

    def forbid(self, peer_id: str, block_ids: Sequence[int]) -> None:
        endpoint = self._endpoints.get(peer_id)
        if endpoint is not None:
            endpoint.permitted.difference_update(block_ids)
            for inlet in [i for i in endpoint.inlets if i.is_writing(block_ids)]:
                self._drop(inlet)

    def poll_arrivals(self) -> list[Arrival]:
        arrivals: list[Arrival] = []
        budget = MAX_POLL_BYTES
        for key, _ in self._selector.select(timeout=0):
            if key.data is None:
                self._accept()
            elif budget > 0:
                inlet: TcpInlet = key.data
                budget -= inlet.receive(arrivals, budget)
                if inlet.is_closed:
                    self._drop(inlet)
        return arrivals

    def fence(self, peer_id: str) -> bool:
        endpoint = self._endpoints.pop(peer_id, None)
        if endpoint is not None:
            for inlet in list(endpoint.inlets):
                self._drop(inlet)
        return True

    def connect(self, peer_id: str, address: bytes) -> Connection:
        to = unpack_address(address, transport=NAME, block_bytes=self.memory.block_bytes)
        try:
            name = msgspec.msgpack.decode(to.endpoint, type=TcpEndpointName)
        except msgspec.DecodeError as error:
            raise BadAddress(f"not a tcp endpoint: {error}") from error
        if not 0 < name.port < 65536 or len(name.token) != TOKEN_BYTES or len(name.host) > 255:
            raise BadAddress("a tcp endpoint field is out of range")
        connection = TcpConnection(self.memory, name.host, name.port, name.token)
        self._connections = [c for c in self._connections if not c.is_closed]
        self._connections.append(connection)
        return connection

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for key in list(self._selector.get_map().values()) if self._selector.get_map() else []:
            if key.data is not None:
                self._drop(key.data)
        self._endpoints.clear()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return  # the dialer gave up meanwhile
        if self._num_inlets >= MAX_INLETS:
            accepted.close()
            return
        inlet = TcpInlet(accepted, self.memory, self._find_endpoint)
        self._num_inlets += 1
        self._selector.register(accepted, selectors.EVENT_READ, inlet)

    def _find_endpoint(self, token: bytes) -> TcpEndpoint | None:
        for endpoint in self._endpoints.values():
            if secrets.compare_digest(endpoint.token, token):
                return endpoint
        return None

    def _drop(self, inlet: TcpInlet) -> None:
        self._selector.unregister(inlet.socket)
        inlet.close()
        self._num_inlets -= 1
