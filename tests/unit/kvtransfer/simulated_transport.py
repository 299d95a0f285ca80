"""A data plane whose writes land when the test says so, also after their sender gave up or died.

This is the worst a one-sided transport does: closing the sender's connection does not stop bytes
that are on their way; only fencing the endpoint does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtransfer.errors import PeerLost
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.memory.segments import SegmentSize
from kvtransfer.transports.address import pack_address, unpack_address
from kvtransfer.transports.base import Arrival, Connection, Transport, Write

NAME = "simulated"


@dataclass
class SimulatedEndpoint:
    peer_id: str
    owner: SimulatedTransport
    is_open: bool = True


@dataclass
class SimulatedWrite(Write):
    endpoint: SimulatedEndpoint
    pairs: list[tuple[bytes, int]]
    header: bytes
    size: SegmentSize
    is_done: bool = False
    is_aborted: bool = False

    def poll(self) -> bool:
        if self.is_done:
            return True
        if self.is_aborted or not self.endpoint.is_open:
            raise PeerLost("gone")
        return False

    def land(self) -> None:
        """The bytes and then the header reach the receiver, unless it has fenced the endpoint."""
        self.is_done = True
        if self.endpoint.is_open:
            owner = self.endpoint.owner
            for data, remote in self.pairs:
                start = remote * self.size.stride
                owner.on_landing(self, start // owner.memory.block_bytes)
                owner.memory.buffer[start : start + self.size.num_bytes] = data
            owner.arrivals.append(Arrival(self.endpoint.peer_id, self.header))


@dataclass
class SimulatedNetwork:
    endpoints: list[SimulatedEndpoint] = field(default_factory=list)
    on_the_way: list[SimulatedWrite] = field(default_factory=list)


class SimulatedConnection(Connection):
    def __init__(
        self, network: SimulatedNetwork, memory: BlockMemory, to: SimulatedEndpoint
    ) -> None:
        self._network = network
        self._memory = memory
        self._endpoint = to
        self._writes: list[SimulatedWrite] = []
        self._is_closed = False

    def write(
        self, local_ids: Sequence[int], remote_ids: Sequence[int], header: bytes, size: SegmentSize
    ) -> Write:
        if self._is_closed or not self._endpoint.is_open:
            raise PeerLost("gone")
        pool, stride = self._memory.buffer, size.stride
        pairs = [
            (bytes(pool[local * stride : local * stride + size.num_bytes]), remote)
            for local, remote in zip(local_ids, remote_ids, strict=True)
        ]
        write = SimulatedWrite(self._endpoint, pairs, header, size)
        self._writes.append(write)
        self._network.on_the_way.append(write)
        return write

    def close(self) -> None:
        self._is_closed = True
        for write in self._writes:
            write.is_aborted = not write.is_done


class SimulatedTransport(Transport):
    name = NAME

    def __init__(
        self,
        memory: BlockMemory,
        network: SimulatedNetwork,
        on_landing: Callable[[SimulatedWrite, int], None] = lambda write, remote: None,
    ) -> None:
        self.memory = memory
        self.network = network
        self.on_landing = on_landing
        self.arrivals: list[Arrival] = []
        self._mine: dict[str, int] = {}

    def open_endpoint(self, peer_id: str) -> bytes:
        if peer_id not in self._mine:
            self._mine[peer_id] = len(self.network.endpoints)
            self.network.endpoints.append(SimulatedEndpoint(peer_id, self))
        return pack_address(NAME, self.memory, 0, str(self._mine[peer_id]).encode())

    def grant_writes(self, peer_id: str, block_ids: Sequence[int]) -> None:
        pass

    def revoke_writes(self, peer_id: str, block_ids: Sequence[int]) -> None:
        pass

    def poll_arrivals(self) -> list[Arrival]:
        arrivals, self.arrivals = self.arrivals, []
        return arrivals

    def fence(self, peer_id: str) -> bool:
        if peer_id in self._mine:
            self.network.endpoints[self._mine.pop(peer_id)].is_open = False
        return True

    def connect(self, peer_id: str, address: bytes) -> Connection:
        to = unpack_address(address, transport=NAME)
        endpoint = self.network.endpoints[int(to.endpoint)]
        return SimulatedConnection(self.network, self.memory, endpoint)

    def close(self) -> None:
        for peer_id in list(self._mine):
            self.fence(peer_id)
