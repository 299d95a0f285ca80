"""Turns submitted blocks into chunk writes: fair between transfers, bounded per receiver.

Owns the connections, one per receiver (a new data-plane address replaces it).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvtransfer.checksum import checksum_blocks
from kvtransfer.errors import PeerLost, TransportError
from kvtransfer.sender_state import InFlight, Outgoing
from kvtransfer.transport import MAX_CHUNK_BLOCKS, Connection, Transport
from mesh import codec
from mesh.messages import ChunkHeader

MAX_CHUNK_BYTES = 8 << 20
"""At shared-memory speed 2–4 ms; the unit of fairness between transfers."""
MAX_IN_FLIGHT_BYTES = 64 << 20
"""Per receiver."""
MAX_POLL_BYTES = 32 << 20
"""Per call: a write may copy inside the call, and the control loop must get its turn."""


@dataclass(slots=True)
class Route:
    """The way to one receiver's current endpoint."""

    receiver_id: str
    address: bytes
    epoch: int
    connection: Connection | None = None
    num_bytes_in_flight: int = 0


class ChunkWriter:
    """Writes for many transfers; the caller tells which ones and handles their failures."""

    def __init__(self, transport: Transport, sender_epoch: int) -> None:
        self._transport = transport
        self._sender_epoch = sender_epoch
        self._routes: dict[str, Route] = {}
        block_bytes = transport.memory.block_bytes
        self._chunk_blocks = min(max(1, MAX_CHUNK_BYTES // block_bytes), MAX_CHUNK_BLOCKS)
        self._turn = 0

    def route(self, receiver_id: str) -> Route | None:
        """The current way to a receiver, if it granted anything yet."""
        return self._routes.get(receiver_id)

    def set_route(self, receiver_id: str, address: bytes, epoch: int) -> None:
        """Start using an address; closes the connection to an earlier one."""
        self.drop_route(receiver_id)
        self._routes[receiver_id] = Route(receiver_id, address, epoch)

    def drop_route(self, receiver_id: str) -> None:
        """Tear the connection down: none of its writes is in flight afterwards."""
        route = self._routes.pop(receiver_id, None)
        if route is not None and route.connection is not None:
            route.connection.close()

    def settle(self, outgoing: Outgoing) -> None:
        """Progress this transfer's writes and drop the finished ones.

        Raises:
            PeerLost: the connection is dead, and with it every write over it.
        """
        route = self._routes.get(outgoing.receiver_id)
        if route is None:
            outgoing.in_flight.clear()
            raise PeerLost("the connection was torn down")
        still: list[InFlight] = []
        for chunk in outgoing.in_flight:
            if chunk.write.poll():
                route.num_bytes_in_flight -= chunk.num_bytes
            else:
                still.append(chunk)
        outgoing.in_flight = still

    def write_some(self, transfers: Iterable[Outgoing]) -> list[tuple[Outgoing, TransportError]]:
        """One chunk of each transfer in turn until nothing is pending or a bound is reached.

        Returns:
            Transfers whose connection failed (PeerLost or another TransportError), once each.
        """
        ready = [t for t in transfers if t.pending]
        if not ready:
            return []
        # Start where the last call stopped, so that a bound reached early is fair over time.
        self._turn %= len(ready)
        ready = ready[self._turn :] + ready[: self._turn]
        failures: list[tuple[Outgoing, TransportError]] = []
        num_bytes = 0
        while ready and num_bytes < MAX_POLL_BYTES:
            again: list[Outgoing] = []
            for outgoing in ready:
                if num_bytes >= MAX_POLL_BYTES:
                    break
                try:
                    written = self._write_chunk(outgoing)
                except TransportError as error:
                    failures.append((outgoing, error))
                    continue
                num_bytes += written
                self._turn += 1
                if written and outgoing.pending:
                    again.append(outgoing)
            ready = again
        return failures

    def _write_chunk(self, outgoing: Outgoing) -> int:
        route, grant = self._routes.get(outgoing.receiver_id), outgoing.grant
        assert grant is not None
        if route is None:
            raise PeerLost("the connection was torn down")
        if route.num_bytes_in_flight >= MAX_IN_FLIGHT_BYTES:
            return 0
        if route.connection is None:
            route.connection = self._transport.connect(route.receiver_id, route.address)
        first_index, local_ids = self._take_run(outgoing)
        start = first_index - grant.first_index
        remote_ids = grant.block_ids[start : start + len(local_ids)]
        num_bytes = len(local_ids) * self._transport.memory.block_bytes
        header = ChunkHeader(
            transfer_id=outgoing.transfer_id,
            epoch=grant.epoch,
            sender_epoch=self._sender_epoch,
            rank=0,
            seq=outgoing.next_seq,
            first_index=first_index,
            num_blocks=len(local_ids),
            num_bytes=num_bytes,
            checksum=checksum_blocks(self._transport.memory, local_ids),
        )
        write = route.connection.write(local_ids, remote_ids, codec.encode(header))
        outgoing.next_seq += 1
        outgoing.num_written += len(local_ids)
        if not write.poll():
            outgoing.in_flight.append(InFlight(write, num_bytes))
            route.num_bytes_in_flight += num_bytes
        return num_bytes

    def _take_run(self, outgoing: Outgoing) -> tuple[int, list[int]]:
        """The next pending blocks with consecutive logical indices, at most one chunk."""
        first_index, block_id = outgoing.pending.popleft()
        run = [block_id]
        while outgoing.pending and len(run) < self._chunk_blocks:
            index, block_id = outgoing.pending[0]
            if index != first_index + len(run):
                break
            outgoing.pending.popleft()
            run.append(block_id)
        return first_index, run
