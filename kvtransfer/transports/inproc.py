"""The data plane inside one process: a copy between two pools, for tests and one-process clusters.

Transports that should reach each other share one ``InprocFabric``.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from kvtransfer.errors import BadAddress, PeerLost, TransportError
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.memory.segments import SegmentSize, copy_segments
from kvtransfer.transports.address import pack_address, unpack_address
from kvtransfer.transports.base import MAX_HEADER_BYTES, Arrival, Connection, Transport, Write
from kvtransfer.transports.write_grants import WriteGrants

NAME = "inproc"


class InprocEndpoint:
    """What one sender may write to."""

    def __init__(self, peer_id: str, memory: BlockMemory) -> None:
        self.peer_id = peer_id
        self.memory = memory
        self.write_grants = WriteGrants(memory.block_bytes)
        self.arrivals: deque[Arrival] = deque()
        self.is_open = True


class InprocFabric:
    """Names the endpoints of the transports that share it."""

    def __init__(self) -> None:
        self.endpoints: dict[str, InprocEndpoint] = {}
        self._names = itertools.count()

    def add(self, endpoint: InprocEndpoint) -> str:
        """Register an endpoint under a fresh name, never reused."""
        name = f"inproc-{next(self._names)}"
        self.endpoints[name] = endpoint
        return name


class InprocWrite(Write):
    """Copies in ``poll``; until then nothing has been written."""

    def __init__(
        self,
        connection: InprocConnection,
        local_ids: Sequence[int],
        remote_ids: Sequence[int],
        header: bytes,
        size: SegmentSize,
    ) -> None:
        self._connection = connection
        self._local_ids = list(local_ids)
        self._remote_ids = list(remote_ids)
        self._header = header
        self._size = size
        self._is_done = False

    def poll(self) -> bool:
        if self._is_done:
            return True
        endpoint = self._connection.endpoint
        if self._connection.is_closed or not endpoint.is_open:
            raise PeerLost("the endpoint is gone")
        if not endpoint.write_grants.take(self._remote_ids, self._size):
            raise PeerLost("a segment is not under a grant")
        copy_segments(
            self._connection.memory.array, self._local_ids,
            endpoint.memory.array, self._remote_ids, self._size,
        )  # fmt: skip
        endpoint.arrivals.append(Arrival(endpoint.peer_id, self._header))
        self._is_done = True
        return True


class InprocConnection(Connection):
    """To one endpoint of the same fabric."""

    def __init__(self, memory: BlockMemory, endpoint: InprocEndpoint) -> None:
        self.memory = memory
        self.endpoint = endpoint
        self.is_closed = False

    def write(
        self, local_ids: Sequence[int], remote_ids: Sequence[int], header: bytes, size: SegmentSize
    ) -> Write:
        if self.is_closed or not self.endpoint.is_open:
            raise PeerLost("the endpoint is gone")
        if len(header) > MAX_HEADER_BYTES:
            raise TransportError("the header is over the cap")
        return InprocWrite(self, local_ids, remote_ids, header, size)

    def close(self) -> None:
        self.is_closed = True


class InprocTransport(Transport):
    """See the module. Host memory only."""

    name = NAME

    def __init__(self, memory: BlockMemory, *, fabric: InprocFabric) -> None:
        self.memory = memory
        self._fabric = fabric
        self._endpoints: dict[str, tuple[str, InprocEndpoint]] = {}

    def open_endpoint(self, peer_id: str) -> bytes:
        if peer_id not in self._endpoints:
            endpoint = InprocEndpoint(peer_id, self.memory)
            self._endpoints[peer_id] = (self._fabric.add(endpoint), endpoint)
        name, _ = self._endpoints[peer_id]
        return pack_address(NAME, self.memory, 0, name.encode())

    def grant_writes(self, peer_id: str, block_ids: Sequence[int]) -> None:
        self._endpoints[peer_id][1].write_grants.grant_writes(block_ids)

    def revoke_writes(self, peer_id: str, block_ids: Sequence[int]) -> None:
        if peer_id in self._endpoints:
            self._endpoints[peer_id][1].write_grants.revoke_writes(block_ids)

    def poll_arrivals(self) -> list[Arrival]:
        arrivals: list[Arrival] = []
        for _, endpoint in self._endpoints.values():
            arrivals.extend(endpoint.arrivals)
            endpoint.arrivals.clear()
        return arrivals

    def fence(self, peer_id: str) -> bool:
        if peer_id in self._endpoints:
            name, endpoint = self._endpoints.pop(peer_id)
            endpoint.is_open = False
            del self._fabric.endpoints[name]
        return True

    def connect(self, peer_id: str, address: bytes) -> Connection:
        to = unpack_address(address, transport=NAME)
        endpoint = self._fabric.endpoints.get(to.endpoint.decode(errors="replace"))
        if endpoint is None:
            raise BadAddress("no such endpoint in this process")
        return InprocConnection(self.memory, endpoint)

    def close(self) -> None:
        for peer_id in list(self._endpoints):
            self.fence(peer_id)
