"""One rank's end of the KV hand-off: its data plane, and the sender or receiver over it."""

from __future__ import annotations

from engine.engine import Engine
from kvtransfer.data_plane import DataPlane, open_data_plane
from kvtransfer.outbox import Send
from kvtransfer.receiver.receiver import TransferReceiver
from kvtransfer.sender.sender import TransferSender
from mesh.config import WorkerConfig
from mesh.worker_info import Role

NICENESS: dict[Role, int] = {"prefill": 10, "decode": 5}
"""Of the computing threads: after what passes tokens on, and prefill after every running answer."""


def open_rank(config: WorkerConfig, engine: Engine, epoch: int) -> DataPlane:
    """The data plane over this rank's KV cache; the caller closes its transport.

    Raises:
        TransportError: the transport can't be had here.
    """
    memory = engine.kv_memory
    return open_data_plane(
        config, engine.kv_spec, memory.buffer, memory.mapping, epoch,
        rank=engine.group.rank, heads=engine.shard.kv_heads,
    )  # fmt: skip


def make_sender(
    config: WorkerConfig, engine: Engine, data_plane: DataPlane, epoch: int, send: Send
) -> TransferSender:
    """The sender of this rank's blocks."""
    return TransferSender(
        worker_id=config.worker_id,
        epoch=epoch,
        fingerprint=engine.fingerprint,
        transport=data_plane.transport,
        send=send,
        layout=data_plane.layout,
        rank=engine.group.rank,
        num_parts=config.kv_layer_groups,
        staging=data_plane.staging,
        lease_s=config.lease_s,
    )


def make_receiver(
    config: WorkerConfig, engine: Engine, data_plane: DataPlane, epoch: int, send: Send
) -> TransferReceiver:
    """The receiver of this rank's blocks."""
    return TransferReceiver(
        worker_id=config.worker_id,
        epoch=epoch,
        fingerprint=engine.fingerprint,
        transport=data_plane.transport,
        send=send,
        layout=data_plane.layout,
        encoding=config.kv_wire,
        lease_s=config.lease_s,
    )
