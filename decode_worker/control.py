"""The decode worker's control loop: messages and KV receipts, beside the model thread."""

from __future__ import annotations

import asyncio
import logging

from decode_worker.loop import (
    BlocksFreed,
    Command,
    DecodeLoop,
    Event,
    KVCommitted,
    KVFailed,
    OpenTransfer,
    Submit,
)
from decode_worker.prefill_links import PrefillLinks
from engine.engine import Engine
from engine.worker_events import Abort, CancelTransfer, Failed, GatewayLost, Tokens
from engine.worker_host import WorkerHost
from engine.worker_runtime import WorkerRuntime
from engine.worker_snapshot import with_transfers
from kvtransfer.events import BlocksReleased, Committed, ReceiveFailed
from kvtransfer.factory import make_transport
from kvtransfer.pool import BlockMemory
from kvtransfer.receiver import TransferReceiver
from mesh.config import WorkerConfig
from mesh.messages import (
    AbortRequest,
    AnyMessage,
    DecodeRequest,
    LoadSnapshot,
    StepOutput,
    TransferMessage,
)
from mesh.service import process_epoch

_logger = logging.getLogger(__name__)

NICENESS = 5
"""Of the computing threads: after what passes tokens on, before a prefill worker's."""


class DecodeControl:
    """Wires the loop, the receiver, the links and the host together; lives in one event loop."""

    def __init__(self, config: WorkerConfig, engine: Engine) -> None:
        epoch = process_epoch()
        self._memory = BlockMemory(
            engine.kv_cache.numpy(),
            num_blocks=engine.kv_spec.num_blocks,
            block_bytes=engine.kv_spec.block_bytes,
        )
        self._transport = make_transport(
            config.transport, self._memory, config.worker_id, epoch,
            host=config.host, advertise_host=config.advertise_host,
        )  # fmt: skip
        self._host = WorkerHost(
            config, engine, epoch=epoch, load=self._load,
            on_message=self._on_message, on_peer_down=self._on_gateway_down,
        )  # fmt: skip
        self._links = PrefillLinks(
            worker_id=config.worker_id,
            epoch=epoch,
            fingerprint=engine.fingerprint,
            on_message=self._on_prefill_message,
            on_down=self._on_prefill_down,
        )
        self._receiver = TransferReceiver(
            worker_id=config.worker_id,
            epoch=epoch,
            fingerprint=engine.fingerprint,
            transport=self._transport,
            send=self._links.send,
            lease_s=config.lease_s,
        )
        self._loop = DecodeLoop(engine)
        self._runtime: WorkerRuntime[Command, Event] = WorkerRuntime(
            self._loop,
            self._host,
            on_events=self._on_events,
            poll=self._poll,
            niceness=NICENESS,
        )
        engine.constrainer.on_ready = self._runtime.wake

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``; raises what the model thread raised."""
        try:
            await self._runtime.run(stop)
        finally:
            await self._links.close()
            self._transport.close()

    def _on_message(self, peer_id: str, message: AnyMessage) -> None:
        if isinstance(message, DecodeRequest):
            self._runtime.post(Submit(message, peer_id))
        elif isinstance(message, AbortRequest):
            self._runtime.post(Abort(message.transfer_id))
        else:
            _logger.warning("unexpected message peer=%s type=%s", peer_id, type(message).__name__)

    def _on_gateway_down(self, peer_id: str) -> None:
        self._runtime.post(GatewayLost(peer_id))

    def _on_prefill_message(self, worker_id: str, message: AnyMessage) -> None:
        if isinstance(message, TransferMessage):
            self._receiver.on_message(worker_id, message)
            self._runtime.poll_soon()

    def _on_prefill_down(self, worker_id: str) -> None:
        self._receiver.on_peer_down(worker_id)
        self._runtime.poll_soon()

    def _on_events(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Tokens():
                    self._host.server.send(event.gateway_id, StepOutput(outputs=event.outputs))
                case OpenTransfer():
                    self._links.ensure(event.prefill)
                    self._receiver.open(
                        event.transfer_id, event.prefill, event.block_ids, event.first_index
                    )
                case CancelTransfer():
                    self._receiver.cancel(event.transfer_id)
                case Failed():
                    self._host.server.send(event.gateway_id, event.message)

    def _poll(self) -> bool:
        for event in self._receiver.poll():
            match event:
                case Committed():
                    self._runtime.post(KVCommitted(event.done))
                case ReceiveFailed():
                    reason = f"{event.code}: {event.message}"
                    self._runtime.post(KVFailed(event.transfer_id, reason))
                case BlocksReleased():
                    self._runtime.post(BlocksFreed(event.transfer_id))
        return self._receiver.num_open > 0

    def _load(self) -> LoadSnapshot:
        return with_transfers(self._loop.snapshot, self._receiver.num_open, self._runtime.draining)
