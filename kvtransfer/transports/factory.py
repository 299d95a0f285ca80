"""Makes the data plane a worker's configuration names."""

from __future__ import annotations

from kvtransfer.memory.pool import BlockMemory
from kvtransfer.transports.auto import AutoTransport
from kvtransfer.transports.base import Transport
from kvtransfer.transports.socket.shm import ShmTransport
from kvtransfer.transports.socket.tcp import TcpTransport
from kvtransfer.transports.ucx.transport import NixlTransport
from mesh.errors import ConfigError

TRANSPORT_NAMES = ("auto", "shm", "ucx", "tcp")


def make_transport(
    name: str,
    memory: BlockMemory,
    worker_id: str,
    epoch: int,
    *,
    host: str = "127.0.0.1",
    advertise_host: str = "",
) -> Transport:
    """A transport over ``memory``; the caller closes it after the sender or receiver that uses it.

    Args:
        name: ``auto`` (by pair), ``shm``, ``ucx`` (NIXL) or ``tcp``.
        memory: The KV pool; must outlive the transport.
        worker_id: For the names of NIXL agents.
        epoch: Likewise: names must differ between starts.
        host: Where ``tcp`` listens.
        advertise_host: What ``tcp`` tells senders to dial; default ``host``.

    Raises:
        ConfigError: an unknown name.
        TransportError: NIXL is not installed or refused.
    """
    if name == "auto":
        return AutoTransport(
            memory, worker_id=worker_id, epoch=epoch, host=host, advertise_host=advertise_host
        )
    if name == "shm":
        return ShmTransport(memory)
    if name == "ucx":
        return NixlTransport(memory, worker_id=worker_id, epoch=epoch)
    if name == "tcp":
        return TcpTransport(memory, host=host, advertise_host=advertise_host)
    raise ConfigError(f"transport: {name!r} is not one of {', '.join(TRANSPORT_NAMES)}")
