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
from engine.model_thread import ModelThread
from engine.worker_events import Abort, CancelTransfer, Failed, GatewayLost, Tokens
from engine.worker_host import WorkerHost, wait_for_stop
from engine.worker_snapshot import with_transfers
from kvtransfer.events import BlocksReleased, Committed, ReceiveFailed
from kvtransfer.factory import make_transport
from kvtransfer.pool import BlockMemory
from kvtransfer.receiver import TransferReceiver
from mesh.config import WorkerConfig
from mesh.errors import PdmeshError
from mesh.messages import (
    AbortRequest,
    AnyMessage,
    DecodeRequest,
    LoadSnapshot,
    StepOutput,
    TransferMessage,
)
from mesh.service import process_epoch

BUSY_POLL_S = 0.001
"""Poll interval while transfers are open: UCX makes progress only when polled."""
IDLE_POLL_S = 0.05

_logger = logging.getLogger(__name__)


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
        self._crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = DecodeLoop(engine)
        self._thread: ModelThread[Command, Event] = ModelThread(
            self._loop, on_events=self._on_events, on_crash=self._on_crash
        )
        self._poll_now = asyncio.Event()
        self._draining = False

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``; raises what the model thread raised."""
        self._thread.start()
        poller = asyncio.create_task(self._poll())
        try:
            await self._host.start()
            await wait_for_stop(stop, self._crashed)
            self._draining = True
        finally:
            await self._host.close()
            await self._thread.close()
            poller.cancel()
            await self._links.close()
            self._transport.close()

    def _on_message(self, peer_id: str, message: AnyMessage) -> None:
        if isinstance(message, DecodeRequest):
            self._thread.post(Submit(message, peer_id))
        elif isinstance(message, AbortRequest):
            self._thread.post(Abort(message.transfer_id))
        else:
            _logger.warning("unexpected message peer=%s type=%s", peer_id, type(message).__name__)

    def _on_gateway_down(self, peer_id: str) -> None:
        self._thread.post(GatewayLost(peer_id))

    def _on_prefill_message(self, worker_id: str, message: AnyMessage) -> None:
        if isinstance(message, TransferMessage):
            self._receiver.on_message(worker_id, message)
            self._poll_now.set()

    def _on_prefill_down(self, worker_id: str) -> None:
        self._receiver.on_peer_down(worker_id)
        self._poll_now.set()

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
                    self._poll_now.set()
                case CancelTransfer():
                    self._receiver.cancel(event.transfer_id)
                    self._poll_now.set()
                case Failed():
                    self._host.server.send(event.gateway_id, event.message)

    async def _poll(self) -> None:
        while True:
            self._poll_now.clear()
            for event in self._receiver.poll():
                match event:
                    case Committed():
                        self._thread.post(KVCommitted(event.done))
                    case ReceiveFailed():
                        reason = f"{event.code}: {event.message}"
                        self._thread.post(KVFailed(event.transfer_id, reason))
                    case BlocksReleased():
                        self._thread.post(BlocksFreed(event.transfer_id))
            interval_s = BUSY_POLL_S if self._receiver.num_open else IDLE_POLL_S
            try:
                async with asyncio.timeout(interval_s):
                    await self._poll_now.wait()
            except TimeoutError:
                continue

    def _load(self) -> LoadSnapshot:
        return with_transfers(self._loop.snapshot, self._receiver.num_open, self._draining)

    def _on_crash(self, error: BaseException) -> None:
        _logger.error("model thread crashed", exc_info=error)
        if not self._crashed.done():
            self._crashed.set_exception(PdmeshError(f"model thread crashed: {error!r}"))
