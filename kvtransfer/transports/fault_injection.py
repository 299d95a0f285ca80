"""Deterministic faults on data plane and control messages, for tests and for trials.

Everything is drawn from one seeded generator, so a single-threaded run repeats exactly. What is
wrapped keeps its contract; it only meets more often what can happen to it anyway: writes that break
or end late, headers that are lost, repeated, late, out of order, cut short or changed, messages
that are lost, repeated, late or out of order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from kvtransfer.errors import PeerLost, Unreachable
from kvtransfer.memory.segments import SegmentSize
from kvtransfer.outbox import Send
from kvtransfer.transports.base import Arrival, Connection, Transport, Write
from mesh import codec
from mesh.errors import ProtocolError
from mesh.messages import ChunkHeader, TransferMessage

MAX_DELAY_POLLS = 20


class Faults:
    """Decides when something goes wrong, and counts it by kind."""

    def __init__(self, rate: float, seed: int) -> None:
        """``rate`` is the probability of a fault for each write, header and message."""
        self.rate = rate
        self.random = random.Random(seed)
        self.counts: dict[str, int] = {}

    def pick(self, *kinds: str) -> str:
        """One of the kinds, or nothing most of the time."""
        if self.random.random() >= self.rate:
            return ""
        kind = self.random.choice(kinds)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        return kind

    def delay(self) -> int:
        """For how many polls something is late."""
        return self.random.randint(1, MAX_DELAY_POLLS)


class FaultySend:
    """Wraps the ``send`` of a sender or receiver. What is late goes out after later messages."""

    def __init__(self, inner: Send, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._late: list[tuple[int, str, TransferMessage]] = []

    def __call__(self, peer_id: str, message: TransferMessage) -> bool:
        kind = self._faults.pick("drop", "repeat", "late", "corrupt")
        is_sent = True  # it left, and that is all that its sender knows
        if kind == "late":
            self._late.append((self._faults.random.randint(1, 4), peer_id, message))
        elif kind != "drop" and (kind != "corrupt" or _survives(message, self._faults)):
            is_sent = self._inner(peer_id, message)
            if kind == "repeat":
                self._inner(peer_id, message)
        late, self._late = self._late, []
        for num_later, its_peer_id, its_message in late:
            if num_later > 0:
                self._late.append((num_later - 1, its_peer_id, its_message))
            else:
                self._inner(its_peer_id, its_message)
        return is_sent


def _survives(message: TransferMessage, faults: Faults) -> bool:
    """Whether a message with one flipped bit is still accepted by the codec."""
    data = bytearray(codec.encode(message))
    if faults.random.random() < 0.5:
        data = data[: faults.random.randrange(len(data))]
    else:
        bit = faults.random.randrange(len(data) * 8)
        data[bit // 8] ^= 1 << bit % 8
    try:
        codec.decode(bytes(data))
    except ProtocolError:
        return False
    return True


class _LateWrite(Write):
    """Done a few polls after it is."""

    def __init__(self, inner: Write, polls: int) -> None:
        self._inner = inner
        self._polls = polls

    def poll(self) -> bool:
        is_done = self._inner.poll()
        self._polls -= 1
        return is_done and self._polls < 0


class _FaultyConnection(Connection):
    def __init__(self, inner: Connection, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self.chunk_bytes = inner.chunk_bytes

    def write(
        self, local_ids: Sequence[int], remote_ids: Sequence[int], header: bytes, size: SegmentSize
    ) -> Write:
        kind = self._faults.pick("break", "late write", "wrong checksum")
        if kind == "break":
            self._inner.close()
            raise PeerLost("injected: the connection broke")
        if kind == "wrong checksum":
            decoded = codec.decode(header)
            assert isinstance(decoded, ChunkHeader)
            changed = msgspec.structs.replace(decoded, checksum=decoded.checksum ^ 1)
            header = codec.encode(changed)
        write = self._inner.write(local_ids, remote_ids, header, size)
        return _LateWrite(write, self._faults.delay()) if kind == "late write" else write

    def close(self) -> None:
        self._inner.close()


class FaultyTransport(Transport):
    """Wraps the data plane of a sender or a receiver, and owns it."""

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self.name = inner.name
        self.memory = inner.memory
        self._inner = inner
        self._faults = faults
        self._late: list[tuple[int, Arrival]] = []
        # Nothing goes wrong in these, or it would be somebody else's fault.
        self.meet = inner.meet  # type: ignore[method-assign]
        self.say_goodbye = inner.say_goodbye  # type: ignore[method-assign]
        self.has_met = inner.has_met  # type: ignore[method-assign]
        self.avoid = inner.avoid  # type: ignore[method-assign]
        self.name_for = inner.name_for  # type: ignore[method-assign]
        self.poll_connections = inner.poll_connections  # type: ignore[method-assign]
        self.arrivals_fileno = inner.arrivals_fileno  # type: ignore[method-assign]
        self.connections_fileno = inner.connections_fileno  # type: ignore[method-assign]

    @property
    def names(self) -> tuple[str, ...]:
        return self._inner.names

    def open_endpoint(self, peer_id: str) -> bytes:
        return self._inner.open_endpoint(peer_id)

    def grant_writes(self, peer_id: str, block_ids: Sequence[int]) -> None:
        self._inner.grant_writes(peer_id, block_ids)

    def revoke_writes(self, peer_id: str, block_ids: Sequence[int]) -> None:
        self._inner.revoke_writes(peer_id, block_ids)

    def poll_arrivals(self) -> list[Arrival]:
        waiting, self._late = self._late, []
        arrivals: list[Arrival] = []
        for polls, arrival in waiting:
            if polls > 1:
                self._late.append((polls - 1, arrival))
            else:
                arrivals.append(arrival)
        for arrival in self._inner.poll_arrivals():
            kind = self._faults.pick("lose header", "repeat header", "late header", "cut header")
            if kind == "late header":
                self._late.append((self._faults.delay(), arrival))
            elif kind == "cut header":
                cut = self._faults.random.randrange(len(arrival.header))
                arrivals.append(Arrival(arrival.peer_id, arrival.header[:cut]))
            elif kind != "lose header":
                arrivals += [arrival] * (2 if kind == "repeat header" else 1)
        return arrivals

    def fence(self, peer_id: str) -> bool:
        return self._inner.fence(peer_id)

    def connect(self, peer_id: str, address: bytes) -> Connection:
        if self._faults.pick("unreachable"):
            raise Unreachable("injected: no way to the endpoint")
        return _FaultyConnection(self._inner.connect(peer_id, address), self._faults)

    def close(self) -> None:
        self._inner.close()
