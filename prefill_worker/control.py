"""The prefill worker's control loop: messages and KV sends, beside the model thread."""

from __future__ import annotations

import asyncio
import logging

from engine.engine import Engine
from engine.model_thread import ModelThread
from engine.worker_events import Abort, CancelTransfer, Failed, GatewayLost, Tokens
from engine.worker_host import WorkerHost, wait_for_stop
from engine.worker_snapshot import with_transfers
from kvtransfer.events import SendFailed
from kvtransfer.factory import make_transport
from kvtransfer.pool import BlockMemory
from kvtransfer.sender import TransferSender
from mesh.config import WorkerConfig
from mesh.errors import PdmeshError
from mesh.messages import (
    AbortRequest,
    AnyMessage,
    LoadSnapshot,
    PrefillRequest,
    StepOutput,
    TransferMessage,
)
from mesh.service import process_epoch
from prefill_worker.loop import (
    Command,
    Event,
    Expect,
    FinishTransfer,
    PrefillLoop,
    SendBlocks,
    Submit,
    TransferEnded,
)

BUSY_POLL_S = 0.001
"""Poll interval while transfers are open: UCX makes progress only when polled."""
IDLE_POLL_S = 0.05

_logger = logging.getLogger(__name__)


class PrefillControl:
    """Wires the loop, the sender and the host together; lives in one event loop."""

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
            on_message=self._on_message, on_peer_down=self._on_peer_down,
        )  # fmt: skip
        self._sender = TransferSender(
            worker_id=config.worker_id,
            epoch=epoch,
            fingerprint=engine.fingerprint,
            transport=self._transport,
            send=self._host.server.send,
            lease_s=config.lease_s,
        )
        self._crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = PrefillLoop(engine)
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
            self._transport.close()

    def _on_message(self, peer_id: str, message: AnyMessage) -> None:
        if isinstance(message, PrefillRequest):
            self._thread.post(Submit(message, peer_id))
        elif isinstance(message, AbortRequest):
            self._thread.post(Abort(message.transfer_id))
        elif isinstance(message, TransferMessage):
            self._sender.on_message(peer_id, message)
            self._poll_now.set()
        else:
            _logger.warning("unexpected message peer=%s type=%s", peer_id, type(message).__name__)

    def _on_peer_down(self, peer_id: str) -> None:
        self._thread.post(GatewayLost(peer_id))
        self._sender.on_peer_down(peer_id)
        self._poll_now.set()

    def _on_events(self, events: list[Event]) -> None:
        sender = self._sender
        for event in events:
            match event:
                case Tokens():
                    self._host.server.send(event.gateway_id, StepOutput(outputs=event.outputs))
                case SendBlocks():
                    sender.submit(event.transfer_id, event.first_index, event.block_ids)
                case FinishTransfer():
                    sender.finish(
                        event.transfer_id,
                        first_token_id=event.first_token_id,
                        finished=event.finished,
                    )
                case Expect():
                    sender.expect(event.transfer_id, event.decode_worker_id, event.ttl_s)
                case CancelTransfer():
                    sender.cancel(event.transfer_id, "cancelled", "aborted by the gateway")
                case Failed():
                    self._host.server.send(event.gateway_id, event.message)
        self._poll_now.set()

    async def _poll(self) -> None:
        while True:
            self._poll_now.clear()
            for event in self._sender.poll():
                why = f"{event.code}: {event.message}" if isinstance(event, SendFailed) else None
                self._thread.post(TransferEnded(event.transfer_id, why))
            interval_s = BUSY_POLL_S if self._sender.num_open else IDLE_POLL_S
            try:
                async with asyncio.timeout(interval_s):
                    await self._poll_now.wait()
            except TimeoutError:
                continue

    def _load(self) -> LoadSnapshot:
        return with_transfers(self._loop.snapshot, self._sender.num_open, self._draining)

    def _on_crash(self, error: BaseException) -> None:
        _logger.error("model thread crashed", exc_info=error)
        if not self._crashed.done():
            self._crashed.set_exception(PdmeshError(f"model thread crashed: {error!r}"))
