"""The data-plane interface. NIXL/UCX, TCP and in-process implement it; one suite tests them all.

A worker makes one Transport over its pool and calls it from one thread only. Receiver half: one
endpoint per sender peer, so that one peer can be fenced without hurting the others. Sender half:
one Connection per endpoint address that a peer granted.

    receiver: open_endpoint(peer) → address        sender: connect(address) → Connection
              grant_writes(peer, blocks)                         connection.write(…) → Write
              poll_arrivals() → [Arrival]                  write.poll() → done?
              revoke_writes(peer, blocks)                         connection.close()
              fence(peer)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.memory.pool import BlockMemory
from kvtransfer.memory.segments import SegmentSize

MAX_HEADER_BYTES = 4096
MAX_CHUNK_SEGMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Arrival:
    """One write is complete and its bytes are visible in this process's pool."""

    peer_id: str
    header: bytes
    """As the sender gave it; not validated."""
    digests: list[int] | None = None
    """xxh3-64 of every written segment, where the transport had it computed beside its work."""


class Write(ABC):
    """One chunk on its way. The source blocks must stay unchanged until it is done or lost."""

    @abstractmethod
    def poll(self) -> bool:
        """Make progress; True once the bytes and the header have reached the receiver's process.

        Raises:
            PeerLost: the write will never finish and can't touch memory any more.
        """


class Connection(ABC):
    """The sender's way to one endpoint of one receiver."""

    chunk_bytes = 8 << 20
    """How much one write should carry: the unit of overlap and of fairness between transfers."""

    @abstractmethod
    def write(
        self, local_ids: Sequence[int], remote_ids: Sequence[int], header: bytes, size: SegmentSize
    ) -> Write:
        """Start writing local segment ``local_ids[i]`` to remote segment ``remote_ids[i]``.

        The ids were validated by the caller. May complete within the call (shared memory does).

        Raises:
            PeerLost: the peer is gone.
            TransportError: the write could not be started; nothing is in flight from it.
        """

    @abstractmethod
    def close(self) -> None:
        """Tear down: no write reads this side's pool afterwards. Idempotent, never raises.

        Bytes of an unfinished write may still wait at the receiver, who fences if told so.
        """


class Transport(ABC):
    """One worker's data plane over one pool. Owns endpoints and connections, borrows the pool."""

    name: str
    memory: BlockMemory

    @property
    def names(self) -> tuple[str, ...]:
        """Transports whose endpoints ``connect`` can dial."""
        return (self.name,)

    def meet(  # noqa: B027
        self, peer_id: str, transports: Sequence[str], peer_host_id: str
    ) -> None:
        """The link to this sender is up; it writes over these transports, from that host.

        Only a transport that chooses needs to know; see ``transports.socket.shm.host_id``.
        """

    def has_met(self, peer_id: str) -> bool:
        """Whether an endpoint can be opened for this sender already."""
        return True

    def say_goodbye(self, peer_id: str) -> None:  # noqa: B027
        """The link is down: what was said at the meeting holds no more."""

    def avoid(self, peer_id: str) -> None:  # noqa: B027
        """This sender can't reach its endpoint, which is fenced next: offer it another kind."""

    def name_for(self, peer_id: str) -> str:
        """The transport over which this sender, met before, should write.

        Raises:
            TransportError: there is none.
        """
        return self.name

    @abstractmethod
    def open_endpoint(self, peer_id: str) -> bytes:
        """Address of the endpoint for this sender; made at the first call and after a fence.

        Raises:
            TransportError: the endpoint could not be made.
        """

    @abstractmethod
    def grant_writes(self, peer_id: str, block_ids: Sequence[int]) -> None:
        """Blocks this peer may write from now on; one-sided transports can't enforce it."""

    @abstractmethod
    def revoke_writes(self, peer_id: str, block_ids: Sequence[int]) -> None:
        """End ``grant_writes``. No fence: one-sided writes on their way still land."""

    @abstractmethod
    def poll_arrivals(self) -> list[Arrival]:
        """Make progress on the receiving side; the completed writes. Nearly free when idle."""

    def poll_connections(self) -> None:  # noqa: B027
        """Make progress on the sending side, also of connections that nothing is written over."""

    def arrivals_fileno(self) -> int | None:
        """What turns readable when ``poll_arrivals`` has something to do; None: poll by the clock.

        It may be readable without cause, and one-sided transports have none.
        """
        return None

    def connections_fileno(self) -> int | None:
        """The same for ``poll_connections`` and the polls of writes."""
        return None

    @abstractmethod
    def fence(self, peer_id: str) -> bool:
        """Destroy the peer's endpoint, whatever the peer does.

        Returns:
            True when the peer can't write into the pool any more (an unknown peer never could);
            False where that can't be proven (device memory mapped by a process on this host): its
            blocks must stay quarantined until the peer is replaced by a later epoch.
        """

    @abstractmethod
    def connect(self, peer_id: str, address: bytes) -> Connection:
        """Prepare to write to an endpoint; may take tens of milliseconds. The caller closes it.

        Raises:
            BadAddress: the address is not acceptable.
            TransportError: the endpoint is not reachable.
        """

    @abstractmethod
    def close(self) -> None:
        """Destroy every endpoint and connection. Idempotent."""
