"""Chooses the data plane for every pair of workers by what both have.

Same host: ``shm``, else ``ucx``, else ``tcp``; other hosts: ``ucx``, else ``tcp``. The receiver
chooses, once it has met the sender on their link (``meet``), and names its choice in the Grant; an
endpoint that the sender could not reach is not offered to it again.
"""

from __future__ import annotations

import importlib.util
import logging
import selectors
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtransfer.errors import BadAddress, TransportError
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.transports.address import transport_of
from kvtransfer.transports.base import Arrival, Connection, Transport
from kvtransfer.transports.socket.base import selector_fileno
from kvtransfer.transports.socket.shm import NAME as SHM
from kvtransfer.transports.socket.shm import ShmTransport, host_id
from kvtransfer.transports.socket.tcp import NAME as TCP
from kvtransfer.transports.socket.tcp import TcpTransport
from kvtransfer.transports.ucx.library import MODULES
from kvtransfer.transports.ucx.transport import NAME as UCX
from kvtransfer.transports.ucx.transport import NixlTransport

NAME = "auto"

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Peer:
    """A sender that was met."""

    transports: tuple[str, ...]
    is_same_host: bool
    unreachable: set[str] = field(default_factory=set)
    in_use: Transport | None = None
    """Where its endpoint is, until it is fenced."""


class AutoTransport(Transport):
    """Makes each of its transports when a pair first needs it."""

    name = NAME

    def __init__(
        self, memory: BlockMemory, *, worker_id: str, epoch: int, host: str, advertise_host: str
    ) -> None:
        """See ``make_transport``; nothing is opened yet.

        Raises:
            TransportError: no transport can serve this pool here.
        """
        self.memory = memory
        self._host_id = host_id()
        self._makers: dict[str, Callable[[], Transport]] = {}
        if self._host_id and memory.mapping is not None and memory.mapping.fd >= 0:
            self._makers[SHM] = lambda: ShmTransport(memory)
        if any(importlib.util.find_spec(module) for module in MODULES):
            self._makers[UCX] = lambda: NixlTransport(memory, worker_id=worker_id, epoch=epoch)
        if memory.is_host:
            self._makers[TCP] = lambda: TcpTransport(
                memory, host=host, advertise_host=advertise_host
            )
        if not self._makers:
            raise TransportError("no transport for this pool: it needs NIXL")
        self._made: dict[str, Transport] = {}
        self._arrivals = selectors.DefaultSelector()
        self._connections = selectors.DefaultSelector()
        self._peers: dict[str, _Peer] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._makers)

    def meet(self, peer_id: str, transports: Sequence[str], peer_host_id: str) -> None:
        is_same_host = bool(self._host_id) and peer_host_id == self._host_id
        known = self._peers.get(peer_id)
        in_use = None if known is None else known.in_use
        self._peers[peer_id] = _Peer(tuple(transports), is_same_host, in_use=in_use)

    def say_goodbye(self, peer_id: str) -> None:
        peer = self._peers.get(peer_id)
        if peer is not None and peer.in_use is None:
            del self._peers[peer_id]

    def has_met(self, peer_id: str) -> bool:
        return peer_id in self._peers

    def avoid(self, peer_id: str) -> None:
        peer = self._peers.get(peer_id)
        if peer is not None and peer.in_use is not None:
            logger.warning("transport %s does not reach us from %s", peer.in_use.name, peer_id)
            peer.unreachable.add(peer.in_use.name)

    def name_for(self, peer_id: str) -> str:
        peer = self._peers[peer_id]
        if peer.in_use is not None:
            return peer.in_use.name
        for name in self._makers:
            is_possible = peer.is_same_host or name != SHM
            if is_possible and name in peer.transports and name not in peer.unreachable:
                return name
        raise TransportError(
            f"{peer_id} writes over {', '.join(peer.transports)}, this worker reads over "
            f"{', '.join(self._makers)}, and none of these joins them"
        )

    def open_endpoint(self, peer_id: str) -> bytes:
        peer = self._peers[peer_id]
        transport = self._make(self.name_for(peer_id))
        address = transport.open_endpoint(peer_id)
        peer.in_use = transport
        return address

    def grant_writes(self, peer_id: str, block_ids: Sequence[int]) -> None:
        transport = self._peers[peer_id].in_use
        assert transport is not None
        transport.grant_writes(peer_id, block_ids)

    def revoke_writes(self, peer_id: str, block_ids: Sequence[int]) -> None:
        peer = self._peers.get(peer_id)
        if peer is not None and peer.in_use is not None:
            peer.in_use.revoke_writes(peer_id, block_ids)

    def poll_arrivals(self) -> list[Arrival]:
        arrivals: list[Arrival] = []
        for transport in self._made.values():
            arrivals += transport.poll_arrivals()
        return arrivals

    def poll_connections(self) -> None:
        for transport in self._made.values():
            transport.poll_connections()

    def arrivals_fileno(self) -> int | None:
        return selector_fileno(self._arrivals)

    def connections_fileno(self) -> int | None:
        return selector_fileno(self._connections)

    def fence(self, peer_id: str) -> bool:
        peer = self._peers.get(peer_id)
        if peer is None or peer.in_use is None:
            return True
        transport, peer.in_use = peer.in_use, None
        return transport.fence(peer_id)

    def connect(self, peer_id: str, address: bytes) -> Connection:
        name = transport_of(address)
        if name not in self._makers:
            raise BadAddress(f"address of transport {name!r}, this worker has none such")
        return self._make(name).connect(peer_id, address)

    def close(self) -> None:
        self._arrivals.close()
        self._connections.close()
        for transport in self._made.values():
            transport.close()

    def _make(self, name: str) -> Transport:
        if name not in self._made:
            made = self._made[name] = self._makers[name]()
            for selector, fileno in (
                (self._arrivals, made.arrivals_fileno()),
                (self._connections, made.connections_fileno()),
            ):
                if fileno is not None:
                    selector.register(fileno, selectors.EVENT_READ)
        return self._made[name]
