"""The data plane over UCX through NIXL: one-sided writes of block lists, headers as notifications.

Every endpoint and every connection has a NIXL agent of its own (20 ms and 5 MB each, measured;
registering 1 GiB adds 0.5 ms), because destroying an agent is the only way to end its transfers.
The receiver needs nothing about the sender: a notification arrives from an agent it never heard of.

With shared memory a write completes inside ``write`` at copy speed; over a network later.
"""

from __future__ import annotations

import gc
import logging
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import numpy as np

from kvtransfer.address import PoolAddress, pack_address, unpack_address
from kvtransfer.alias import MemoryAlias
from kvtransfer.errors import BadAddress, PeerLost, TransportError
from kvtransfer.nixl_library import NixlLibrary, load_nixl
from kvtransfer.pool import BlockMemory
from kvtransfer.transport import Arrival, Connection, Transport, Write

logger = logging.getLogger(__name__)

NAME = "ucx"
_FLUSH_S = 0.005


def _memory_kind(is_host: bool) -> str:
    return "DRAM" if is_host else "VRAM"


class _Agent:
    """One NIXL agent with the pool registered at ``base``. ``destroy`` ends everything it does."""

    def __init__(self, nixl: NixlLibrary, name: str, memory: BlockMemory, base: int) -> None:
        self._nixl = nixl
        self.handle: Any = nixl.make_agent(name)
        self.kind = _memory_kind(memory.is_host)
        region = [(base, memory.num_bytes, memory.device_id, "")]
        try:
            self._registration: Any = self.handle.register_memory(region, self.kind)
        except nixl.errors as error:
            raise TransportError(f"could not register the KV pool: {error}") from error

    def destroy(self) -> bool:
        """End it now; False if something still refers to it, so that it lives on."""
        if self.handle is None:
            return True
        reference = weakref.ref(self.handle.agent)
        with suppress(*self._nixl.errors):  # the agent goes next, and its registration with it
            self.handle.deregister_memory(self._registration)
        # The last references: NIXL destroys the agent here.
        self.handle = self._registration = None
        if reference() is not None:
            gc.collect()  # a frame in somebody's traceback, most likely
        return reference() is None


class _Endpoint:
    """What one sender may write to: an agent over an alias of the pool."""

    def __init__(
        self, agent: _Agent, alias: MemoryAlias | None, address: bytes, can_fence: bool
    ) -> None:
        self.agent = agent
        self.alias = alias
        self.address = address
        self.can_fence = can_fence
        """Whether destroying agent and alias provably ends every write."""


class _NixlWrite(Write):
    def __init__(self, connection: _NixlConnection) -> None:
        self.connection = connection
        self.handle: Any = None
        self.is_done = False

    def poll(self) -> bool:
        if not self.is_done:
            self.is_done = self.connection.advance(self)
        return self.is_done


class _NixlConnection(Connection):
    def __init__(
        self, nixl: NixlLibrary, agent: _Agent, memory: BlockMemory, to: PoolAddress
    ) -> None:
        self._nixl = nixl
        self._agent = agent
        self._remote_name = ""
        self._open_writes: set[_NixlWrite] = set()
        self._lists: list[Any] = []
        self.is_closed = False
        nixl_agent, fault = agent.handle, ""
        try:
            name = nixl_agent.add_remote_agent(to.endpoint)
            self._remote_name = name.decode() if isinstance(name, bytes) else name
            for owner, base, count, device_id, is_host in (
                (
                    "NIXL_INIT_AGENT",
                    memory.address,
                    memory.num_blocks,
                    memory.device_id,
                    memory.is_host,
                ),
                (self._remote_name, to.base, to.num_blocks, to.device_id, to.is_host),
            ):
                size = memory.block_bytes
                strided = np.array([[base, size, device_id, size, count]], dtype=np.uint64)
                self._lists.append(
                    nixl_agent.prep_xfer_dlist(owner, strided, _memory_kind(is_host))
                )
        except nixl.errors as error:
            fault = str(error)
        del nixl_agent
        if fault:
            self.close()
            raise BadAddress(f"the peer's NIXL agent is not usable: {fault}")

    def write(self, local_ids: Sequence[int], remote_ids: Sequence[int], header: bytes) -> Write:
        if self.is_closed:
            raise PeerLost("the connection is closed")
        local = np.array(local_ids, dtype=np.int32)
        remote = np.array(remote_ids, dtype=np.int32)
        write, fault = _NixlWrite(self), ""
        try:
            write.handle = self._agent.handle.make_prepped_xfer(
                "WRITE", self._lists[0], local, self._lists[1], remote, header
            )
        except self._nixl.errors as error:
            fault = str(error)
        if fault:
            self._lose(fault)
        self._open_writes.add(write)
        write.is_done = self._settle(write, is_new=True)
        return write

    def advance(self, write: _NixlWrite) -> bool:
        """Progress of one write; see ``Write.poll``."""
        if write not in self._open_writes:
            raise PeerLost("the connection was torn down under this write")
        return self._settle(write, is_new=False)

    def _settle(self, write: _NixlWrite, *, is_new: bool) -> bool:
        state = fault = ""
        try:
            if is_new:
                state = self._agent.handle.transfer(write.handle)
            else:
                state = self._agent.handle.check_xfer_state(write.handle)
            if state == "DONE":
                self._agent.handle.release_xfer_handle(write.handle)
                write.handle = None  # it would keep the agent alive
        except self._nixl.errors as error:
            fault = str(error)
        if fault or state not in ("DONE", "PROC"):
            self._lose(fault or f"the write ended as {state}")
        if state == "PROC":
            return False
        self._open_writes.discard(write)
        return True

    def _lose(self, fault: str) -> NoReturn:
        """End the agent, which alone proves that nothing is in flight.

        NIXL raises a disconnect rather than returning it. Its exception must not be chained here:
        the frames in its traceback would keep the agent alive.
        """
        self.close()
        raise PeerLost(f"NIXL: {fault}")

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._release_handles()
        # UCX aborts the process if an agent goes while a dead peer's operations are queued in it
        # (seen in 11 of 16 runs); a moment of progress flushes them (0 of 24 runs).
        deadline_s = time.monotonic() + _FLUSH_S
        while time.monotonic() < deadline_s:
            self._agent.handle.get_new_notifs()
        if not self._agent.destroy():
            logger.error("a NIXL agent outlived its connection")

    def _release_handles(self) -> None:
        """Drop everything that refers to the agent; its own frame, so that no local does either."""
        agent = self._agent.handle
        for write in self._open_writes:
            self._quietly(agent.release_xfer_handle, write.handle)
            write.handle = None
        self._open_writes.clear()
        for prepared in self._lists:
            self._quietly(agent.release_dlist_handle, prepared)
        self._lists.clear()
        if self._remote_name:
            self._quietly(agent.remove_remote_agent, self._remote_name)

    def _quietly(self, call: Any, argument: Any) -> None:
        with suppress(*self._nixl.errors):  # destroying the agent follows and settles it
            call(argument)


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
        self._connections: list[_NixlConnection] = []
        # Loads the plugins now, not at the first request; then serves the first connection.
        self._spare: _Agent | None = self._make_agent(memory.address)

    def open_endpoint(self, peer_id: str) -> bytes:
        endpoint = self._endpoints.get(peer_id)
        if endpoint is None:
            endpoint = self._endpoints[peer_id] = self._make_endpoint()
        return endpoint.address

    def permit(self, peer_id: str, block_ids: Sequence[int]) -> None:
        """Nothing to do: a one-sided write is not checked by its target."""

    def forbid(self, peer_id: str, block_ids: Sequence[int]) -> None:
        """Nothing to do, see ``permit``."""

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
        to = unpack_address(address, transport=NAME, block_bytes=self.memory.block_bytes)
        agent, self._spare = self._spare or self._make_agent(self.memory.address), None
        connection = _NixlConnection(self._nixl, agent, self.memory, to)
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

    def _make_agent(self, base: int) -> _Agent:
        self._num_agents += 1
        name = f"{self._name_prefix}/{self._num_agents}"
        return _Agent(self._nixl, name, self.memory, base)


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
