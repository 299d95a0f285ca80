"""A worker's KV cache, its layout and its transport, as transfers need them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Protocol

from kvtransfer.memory.layout import BlockLayout
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.memory.staging import StagingBlocks
from kvtransfer.outbox import Send
from kvtransfer.ranks.names import rank_peer
from kvtransfer.transports.base import Transport
from kvtransfer.transports.factory import make_transport
from kvtransfer.transports.fault_injection import Faults, FaultySend, FaultyTransport
from kvtransfer.transports.socket.shm import host_id
from mesh.config import WorkerConfig
from mesh.errors import ConfigError
from mesh.kv_heads import Heads
from mesh.messages import DataPlaneOffer
from mesh.shared_mapping import SharedMapping

_ELEMENTS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""By KV dtype; others can't be compressed."""


class KVGeometry(Protocol):
    """What the engine's cache specification says."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True, slots=True)
class DataPlane:
    """Owned by the worker, who calls ``transport.close()`` at its end."""

    layout: BlockLayout
    transport: Transport
    staging: StagingBlocks
    offer: DataPlaneOffer
    faults: Faults | None
    """Set to inject faults (``inject_faults``)."""

    def wrap(self, send: Send) -> Send:
        """What a sender or receiver should send with."""
        return send if self.faults is None else FaultySend(send, self.faults)


def open_data_plane(
    config: WorkerConfig,
    geometry: KVGeometry,
    raw: Any,
    mapping: SharedMapping | None,
    epoch: int,
    *,
    rank: int = 0,
    heads: Heads | None = None,
) -> DataPlane:
    """Make the transport that the configuration names over the KV cache.

    Args:
        config: The worker's.
        geometry: Of the blocks that sequences use.
        raw: The cache's memory: these blocks, then ``config.num_staging_blocks`` more.
        mapping: What ``raw`` lies in, see ``BlockMemory``.
        epoch: This start of the worker.
        rank: Whose cache it is, of the worker's ranks.
        heads: Which of the model's KV heads this rank holds; None: all.

    Raises:
        TransportError: the transport can't be had here.
        ConfigError: the cache is a GPU's, and its KV can't be compressed on its way.
    """
    peer_id = rank_peer(config.worker_id, rank) if rank else config.worker_id
    layout = BlockLayout(
        num_rows=2 * geometry.num_layers,
        heads=heads or Heads(start=0, stop=geometry.num_kv_heads),
        head_bytes=geometry.block_size * geometry.row_bytes,
        element=_ELEMENTS.get(geometry.dtype, ""),
    )
    memory = BlockMemory(
        raw,
        num_blocks=geometry.num_blocks + config.num_staging_blocks,
        block_bytes=layout.block_bytes,
        mapping=mapping,
    )
    if config.kv_wire and not memory.is_host:
        raise ConfigError(
            f"kv_wire: {config.kv_wire} compresses KV in host memory, and this worker's is a GPU's"
        )
    transport = make_transport(
        config.transport, memory, peer_id, epoch,
        host=config.host, advertise_host=config.advertise_host,
    )  # fmt: skip
    faults = None
    if config.inject_faults:
        faults = Faults(config.inject_faults, zlib.crc32(peer_id.encode()))
        transport = FaultyTransport(transport, faults)
    return DataPlane(
        layout,
        transport,
        StagingBlocks(geometry.num_blocks, config.num_staging_blocks),
        DataPlaneOffer(transports=transport.names, host_id=host_id()),
        faults,
    )
