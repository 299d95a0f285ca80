"""Turns submitted blocks into chunk writes: fair between transfers, bounded per receiver.

Owns the connections, one per receiver (a new data-plane address replaces it).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvtransfer.errors import PeerLost, TransportError
from kvtransfer.lease import Clock
from kvtransfer.memory.compression import encode_segments, encoded_size
from kvtransfer.memory.layout import BlockLayout, part_of, segment_ids
from kvtransfer.memory.segments import (
    SegmentSize,
    combine_digests,
    digest_blocks,
    digest_segments,
)
from kvtransfer.memory.staging import StagingBlocks
from kvtransfer.sender.state import InFlight, Outgoing
from kvtransfer.transports.base import MAX_CHUNK_SEGMENTS, Connection, Transport
from mesh import codec
from mesh.messages import ChunkHeader

MAX_IN_FLIGHT_BYTES = 64 << 20
"""Per receiver."""
MAX_POLL_BYTES = 32 << 20
"""Per call: a write may copy inside the call, and the control loop must get its turn."""


@dataclass(slots=True)
class Route:
    """The way to one receiver's current endpoint."""

    receiver_id: str
    address: bytes
    connection: Connection | None = None
    num_bytes_in_flight: int = 0


class ChunkWriter:
    """Writes for many transfers; the caller tells which ones and handles their failures."""

    def __init__(
        self,
        transport: Transport,
        sender_epoch: int,
        layout: BlockLayout,
        rank: int,
        staging: StagingBlocks,
        clock: Clock,
    ) -> None:
        self._transport = transport
        self._sender_epoch = sender_epoch
        self._layout = layout
        self._rank = rank
        self._staging = staging
        self._clock = clock
        self._routes: dict[str, Route] = {}
        self._turn = 0

    def route(self, receiver_id: str) -> Route | None:
        """The current way to a receiver, if it granted anything yet."""
        return self._routes.get(receiver_id)

    def set_route(self, receiver_id: str, address: bytes) -> None:
        """Start using an address; closes the connection to an earlier one."""
        self.drop_route(receiver_id)
        self._routes[receiver_id] = Route(receiver_id, address)

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
            self.forget(outgoing)
            raise PeerLost("the connection was torn down")
        still: list[InFlight] = []
        for chunk in outgoing.in_flight:
            if chunk.write.poll():
                route.num_bytes_in_flight -= chunk.num_bytes
                self._staging.give_back(chunk.staged)
            else:
                still.append(chunk)
        outgoing.in_flight = still
        if not still:
            outgoing.time.pause(self._clock())

    def forget(self, outgoing: Outgoing) -> None:
        """Its connection was torn down: none of its writes is in flight."""
        for chunk in outgoing.in_flight:
            self._staging.give_back(chunk.staged)
        outgoing.in_flight.clear()
        outgoing.time.pause(self._clock())

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
        route, grant, plan = self._routes.get(outgoing.receiver_id), outgoing.grant, outgoing.plan
        assert grant is not None
        assert plan is not None
        if route is None:
            raise PeerLost("the connection was torn down")
        if route.num_bytes_in_flight >= MAX_IN_FLIGHT_BYTES:
            return 0
        outgoing.time.resume(self._clock())
        if route.connection is None:
            route.connection = self._transport.connect(route.receiver_id, route.address)
        segments_per_block = len(plan.local) // plan.num_parts
        most = min(
            route.connection.chunk_bytes // (segments_per_block * plan.stride),
            MAX_CHUNK_SEGMENTS // segments_per_block,
        )
        run = outgoing.take_run(max(1, most))
        part, first_index = run[0].part, run[0].index
        blocks = tuple(entry.block_id for entry in run)
        start = first_index - grant.first_index
        remote_ids = segment_ids(
            grant.block_ids[start : start + len(blocks)],
            part_of(plan.remote, part, plan.num_parts), plan.remote_per_block,
        )  # fmt: skip
        local_ids = segment_ids(
            blocks, part_of(plan.local, part, plan.num_parts), plan.local_per_block
        )
        encoding, size = "", plan.size
        staged: tuple[int, ...] = ()
        if grant.encoding:
            encoding, size, local_ids, staged = self._compress(grant.encoding, local_ids, plan.size)
        num_bytes = len(local_ids) * size.num_bytes
        digests = [entry.digest for entry in run]
        if not plan.is_whole or encoding:
            digests = self._digests(local_ids, size, len(local_ids) // len(run))
        header = ChunkHeader(
            transfer_id=outgoing.transfer_id,
            epoch=grant.epoch,
            sender_epoch=self._sender_epoch,
            rank=self._rank,
            seq=outgoing.next_seq,
            first_index=first_index,
            num_blocks=len(blocks),
            num_bytes=num_bytes,
            checksum=combine_digests([digest or 0 for digest in digests]),
            stride=plan.stride,
            part=part,
            num_parts=plan.num_parts,
            encoding=encoding,
        )
        try:
            write = route.connection.write(local_ids, remote_ids, codec.encode(header), size)
            is_done = write.poll()
        except TransportError:
            self._staging.give_back(staged)
            raise
        outgoing.next_seq += 1
        outgoing.num_written += len(blocks)
        outgoing.num_bytes += num_bytes
        if is_done:
            self._staging.give_back(staged)
            if not outgoing.in_flight:
                outgoing.time.pause(self._clock())
        else:
            outgoing.in_flight.append(InFlight(write, num_bytes, staged))
            route.num_bytes_in_flight += num_bytes
        return num_bytes

    def digest(self, num_parts: int, block_id: int, part: int) -> int | None:
        """Of a part of a block: now, behind the prefill, rather than when the receiver waits."""
        memory = self._transport.memory
        if not memory.is_host:
            return None
        part_bytes = memory.block_bytes // num_parts
        segment = block_id * num_parts + part
        return digest_segments(memory.array, (segment,), SegmentSize(part_bytes, part_bytes))[0]

    def _digests(
        self, local_ids: list[int], size: SegmentSize, segments_per_block: int
    ) -> list[int | None]:
        """Of what is written, where that is not what was submitted; none of device memory."""
        memory = self._transport.memory
        if not memory.is_host:
            return []
        return [*digest_blocks(memory.array, local_ids, size, segments_per_block)]

    def _compress(
        self, encoding: str, local_ids: list[int], size: SegmentSize
    ) -> tuple[str, SegmentSize, list[int], tuple[int, ...]]:
        """Compressed copies of the segments; where there is no room for them, the segments.

        Returns:
            Encoding and size of the segments to write, their ids, the staging blocks they lie in.
        """
        as_it_is = "", size, local_ids, ()
        per_block = self._layout.block_bytes // size.stride
        smaller = encoded_size(size.stride, self._layout.element)
        staged = self._staging.take(-(-len(local_ids) // per_block)) if smaller else ()
        if smaller is None or not staged:
            return as_it_is
        places = segment_ids(staged, tuple(range(per_block)), per_block)[: len(local_ids)]
        pool = self._transport.memory.array
        if not encode_segments(pool, local_ids, size.stride, self._layout.element, places):
            self._staging.give_back(staged)
            return as_it_is
        return encoding, smaller, places, staged
