"""The data plane over UCX through NIXL: one-sided writes of block lists, headers as notifications.

Every endpoint and every connection has a NIXL agent of its own (20 ms and 5 MB each, measured;
registering 1 GiB adds 0.5 ms), because destroying an agent is the only way to end its transfers.
The receiver needs nothing about the sender: a notification arrives from an agent it never heard of.

With shared memory a write completes inside ``write`` at copy speed; over a network later.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvtransfer.memory.alias import MemoryAlias
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.transports.address import pack_address, unpack_address
from kvtransfer.transports.base import Arrival, Connection, Transport
from kvtransfer.transports.ucx.agent import NixlAgent
from kvtransfer.transports.ucx.connection import NixlConnection
from kvtransfer.transports.ucx.library import load_nixl

NAME = "ucx"


class _Endpoint:
    """What one sender may write to: an agent over an alias of the pool."""

    def __init__(
        self, agent: NixlAgent, alias: MemoryAlias | None, address: bytes, can_fence: bool
    ) -> None:
        self.agent = agent
        self.alias = alias
        self.address = address
        self.can_fence = can_fence
        """Whether destroying agent and alias provably ends every write."""


class NixlTransport(Transport):
    """See the module; ``close`` it before the process exits, or NIXL may abort at exit."""

    name = NAME

    def __init__(self, memory: BlockMemory, *, worker_id: str, epoch: int) -> None:
        """Load NIXL and make a first agent, which costs about half a second once per process.

        Raises:
            TransportError: NIXL is not installed or refused.
        """
        self.memory = memory
        self._nixl = load_nixl()
        self._name_prefix = f"{worker_id}/{epoch}"
        self._num_agents = 0
        self._endpoints: dict[str, _Endpoint] = {}
        self._connections: list[NixlConnection] = []
        # Loads the plugins now, not at the first request; then serves the first connection.
        self._spare: NixlAgent | None = self._make_agent(memory.address)

    def open_endpoint(self, peer_id: str) -> bytes:
        endpoint = self._endpoints.get(peer_id)
        if endpoint is None:
            endpoint = self._endpoints[peer_id] = self._make_endpoint()
        return endpoint.address

    def grant_writes(self, peer_id: str, block_ids: Sequence[int]) -> None:
        """Nothing to do: a one-sided write is not checked by its target."""

    def revoke_writes(self, peer_id: str, block_ids: Sequence[int]) -> None:
        """Nothing to do, see ``grant_writes``."""

    def poll_arrivals(self) -> list[Arrival]:
        arrivals: list[Arrival] = []
        for peer_id, endpoint in self._endpoints.items():
            for headers in endpoint.agent.handle.get_new_notifs().values():
                arrivals.extend(Arrival(peer_id, bytes(header)) for header in headers)
        return arrivals

    def fence(self, peer_id: str) -> bool:
        endpoint = self._endpoints.pop(peer_id, None)
        if endpoint is None:
            return True
        return self._destroy_endpoint(endpoint)

    def connect(self, peer_id: str, address: bytes) -> Connection:
        to = unpack_address(address, transport=NAME)
        agent, self._spare = self._spare or self._make_agent(self.memory.address), None
        connection = NixlConnection(self._nixl, agent, self.memory, to)
        self._connections = [c for c in self._connections if not c.is_closed]
        self._connections.append(connection)
        return connection

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for peer_id in list(self._endpoints):
            self.fence(peer_id)
        if self._spare is not None:
            self._spare.destroy()
            self._spare = None

    def _make_endpoint(self) -> _Endpoint:
        alias = self.memory.map_alias()
        base = self.memory.address if alias is None else alias.address
        try:
            with _ucx_transports(self.memory.is_host, alias is not None) as can_fence:
                agent = self._make_agent(base)
            metadata = bytes(agent.handle.get_agent_metadata())
            address = pack_address(NAME, self.memory, base, metadata)
            return _Endpoint(agent, alias, address, can_fence)
        except BaseException:
            if alias is not None:
                alias.unmap()  # no peer was ever told this address
            raise

    def _destroy_endpoint(self, endpoint: _Endpoint) -> bool:
        is_destroyed = endpoint.agent.destroy()
        if endpoint.alias is not None:
            try:
                endpoint.alias.cut()
            except OSError:
                return False
        return endpoint.can_fence and is_destroyed

    def _make_agent(self, base: int) -> NixlAgent:
        self._num_agents += 1
        name = f"{self._name_prefix}/{self._num_agents}"
        return NixlAgent(self._nixl, name, self.memory, base)


@contextmanager
def _ucx_transports(is_host: bool, has_alias: bool) -> Iterator[bool]:
    """Keep out of an endpoint what writes without the target's agent and can't be cut off.

    CMA honours a cut alias; without one it must go. xpmem and knem keep a hold on the pages.
    Yields whether a fence of the endpoint made inside will be proof. It is none for device memory
    (a process on this host may hold it mapped through cuda_ipc beyond the agent's life), nor where
    an operator's own UCX_TLS, which is left alone, allows one of these.
    """
    if not is_host:
        yield False
    elif (chosen := os.environ.get("UCX_TLS")) is not None:
        allowed = set() if chosen.startswith("^") else set(chosen.split(","))
        unsafe = {"all", "xpmem", "knem"} | (set() if has_alias else {"cma", "sm", "shm"})
        refused = set(chosen[1:].split(",")) if chosen.startswith("^") else unsafe
        yield not allowed & unsafe and unsafe - {"all", "sm", "shm"} <= refused
    else:
        os.environ["UCX_TLS"] = "^xpmem,knem" if has_alias else "^cma,xpmem,knem"
        try:
            yield True
        finally:
            del os.environ["UCX_TLS"]
