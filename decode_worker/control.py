"""The decode worker's control loop: messages and KV receipts, beside the model thread."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

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
from kvtransfer.events import BlocksReleased, Committed, ReceiveFailed
from kvtransfer.metrics import ReceiveMetrics
from kvtransfer.ranks.messages import ReceiveReport
from kvtransfer.ranks.names import by_worker
from kvtransfer.ranks.receiver import RankedReceiver
from kvtransfer.ranks.remote_receiver import RemoteReceiver
from mesh.config import WorkerConfig
from mesh.errors import IncompatiblePeer, PdmeshError, TransferFailed
from mesh.messages import (
    AbortRequest,
    AnyMessage,
    DataPlaneOffer,
    DecodeRequest,
    RequestFailed,
    StepOutput,
    TransferMessage,
)
from mesh.service import process_epoch
from mesh.telemetry.log_format import about
from mesh.worker_info import LoadSnapshot
from worker.commands import Abort, CancelTransfer, Failed, GatewayLost, Tokens
from worker.followers.follower_processes import FollowerProcesses
from worker.host import WorkerHost
from worker.kv import NICENESS, make_receiver, open_rank
from worker.load import with_transfers
from worker.runtime import WorkerRuntime
from worker.spans import log_failure, log_leg, open_spans

_logger = logging.getLogger(__name__)


class DecodeControl:
    """Wires the loop, the receiver, the links and the host together; lives in one event loop."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        followers: FollowerProcesses | None = None,
        epoch: int = 0,
    ) -> None:
        """Wire everything up; nothing runs before ``run``.

        Args:
            config: The worker's.
            engine: Of this process, which is rank 0 where there are several.
            followers: The other ranks; the caller closes them.
            epoch: This start of the worker; 0: now.
        """
        epoch = epoch or process_epoch()
        data_plane = open_rank(config, engine, epoch)
        self._transport = data_plane.transport
        self._host = WorkerHost(
            config, engine, epoch=epoch, offer=data_plane.offer, load=self._load,
            on_message=self._on_message, on_peer_down=self._on_gateway_down,
        )  # fmt: skip
        self._links = PrefillLinks(
            worker_id=config.worker_id,
            epoch=epoch,
            fingerprint=engine.fingerprint,
            offer=data_plane.offer,
            on_message=self._on_prefill_message,
            on_up=self._on_prefill_up,
            on_down=self._on_prefill_down,
        )
        send = by_worker(data_plane.wrap(self._links.send))
        remotes = []
        if followers is not None:
            remotes = [
                RemoteReceiver(partial(followers.send, rank), send, config.lease_s)
                for rank in range(1, followers.size)
            ]
        self._receiver = RankedReceiver(
            [make_receiver(config, engine, data_plane, epoch, send), *remotes],
            num_kv_heads=engine.model_config.num_kv_heads,
        )
        self._loop = DecodeLoop(engine)
        self._runtime: WorkerRuntime[Command, Event] = WorkerRuntime(
            self._loop,
            self._host,
            on_events=self._on_events,
            poll=self._poll,
            poll_fileno=self._transport.arrivals_fileno(),
            niceness=NICENESS["decode"],
            load=self._load,
            drain_s=config.drain_s,
        )
        if followers is not None:
            followers.on_lost = self._runtime.fail
            followers.on_report = lambda rank, report: self._on_report(remotes[rank - 1], report)
        engine.grammars.on_ready = self._runtime.wake
        self._metrics = ReceiveMetrics()
        self._spans = open_spans(config)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``; raises what the model thread raised."""
        try:
            await self._runtime.run(stop)
        finally:
            await self._links.close()
            self._transport.close()
            if self._spans is not None:
                await asyncio.to_thread(self._spans.close)

    def _on_message(self, peer_id: str, message: AnyMessage) -> None:
        if isinstance(message, DecodeRequest):
            self._runtime.post(Submit(message, peer_id))
            if self._spans is not None:
                self._spans.on_request(message)
            log_leg(_logger, message)
        elif isinstance(message, AbortRequest):
            self._runtime.post(Abort(message.transfer_id))
            if self._spans is not None:
                self._spans.forget(message.transfer_id)
        else:
            _logger.warning("unexpected message peer=%s type=%s", peer_id, type(message).__name__)

    def _on_report(self, remote: RemoteReceiver, report: ReceiveReport) -> None:
        remote.on_report(report)
        self._runtime.poll_soon()

    def _on_gateway_down(self, peer_id: str) -> None:
        self._runtime.post(GatewayLost(peer_id))

    def _on_prefill_message(self, worker_id: str, message: AnyMessage) -> None:
        if isinstance(message, TransferMessage):
            self._receiver.on_message(worker_id, message)
            self._runtime.poll_soon()

    def _on_prefill_up(self, worker_id: str, offer: DataPlaneOffer) -> None:
        self._receiver.on_peer_up(worker_id, offer.transports, offer.host_id)
        self._runtime.poll_soon()

    def _on_prefill_down(self, worker_id: str, error: PdmeshError) -> None:
        if isinstance(error, IncompatiblePeer):
            self._receiver.on_peer_down(worker_id, IncompatiblePeer.code, str(error))
        else:
            self._receiver.on_peer_down(worker_id)
        self._runtime.poll_soon()

    def _on_events(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Tokens():
                    self._host.server.send(event.gateway_id, StepOutput(outputs=event.outputs))
                    if self._spans is not None:
                        self._spans.on_outputs(event.outputs, is_prefill=False)
                case OpenTransfer():
                    if self._spans is not None:
                        self._spans.on_transfer_begun(event.transfer_id)
                    self._links.ensure(event.prefill)
                    self._receiver.open(
                        event.transfer_id, event.prefill, event.block_ids, event.first_index
                    )
                case CancelTransfer():
                    self._receiver.cancel(event.transfer_id)
                case Failed():
                    self._host.server.send(event.gateway_id, event.message)
                    self._on_failed(event.message)

    def _poll(self) -> bool:
        for event in self._receiver.poll():
            match event:
                case Committed():
                    self._runtime.post(KVCommitted(event.done, event.late_s))
                    self._on_committed(event)
                case ReceiveFailed():
                    self._metrics.observe_failure(event.code)
                    ids = about(transfer_id=event.transfer_id, code=event.code)
                    _logger.info("kv transfer failed %s", event.message, extra=ids)
                    self._runtime.post(KVFailed(event.transfer_id, _error(event)))
                case BlocksReleased():
                    self._runtime.post(BlocksFreed(event.transfer_id))
        return self._receiver.num_open > 0

    def _on_committed(self, event: Committed) -> None:
        self._metrics.observe(event)
        if self._spans is not None:
            self._spans.on_transfer_done("kv receive", event.transfer_id, {})
            if event.done.finished:
                self._spans.forget(event.transfer_id)

    def _on_failed(self, message: RequestFailed) -> None:
        log_failure(_logger, message)
        if self._spans is not None:
            self._spans.on_failed(message.transfer_id, message.code)

    def _load(self) -> LoadSnapshot:
        return with_transfers(self._loop.snapshot, self._receiver.num_open, self._runtime.draining)


def _error(event: ReceiveFailed) -> PdmeshError:
    if event.code == IncompatiblePeer.code:
        return IncompatiblePeer(event.message)
    return TransferFailed(f"KV transfer failed: {event.code}: {event.message}")
