"""The prefill worker's control loop: messages and KV sends, beside the model thread."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial

from engine.engine import Engine
from kvtransfer.events import SendDone, SenderEvent, SendFailed
from kvtransfer.metrics import TransferMetrics
from kvtransfer.ranks.messages import SendReport
from kvtransfer.ranks.names import by_worker
from kvtransfer.ranks.remote_sender import RemoteSender
from kvtransfer.ranks.sender import RankedSender
from mesh.config import WorkerConfig
from mesh.messages import (
    AbortRequest,
    AnyMessage,
    Grant,
    PrefillRequest,
    RequestFailed,
    StepOutput,
    TransferMessage,
)
from mesh.service import process_epoch
from mesh.telemetry.log_format import about
from mesh.worker_info import LoadSnapshot
from prefill_worker.loop import (
    Command,
    Congestion,
    Event,
    FinishTransfer,
    Granted,
    PrefillLoop,
    SendBlocks,
    Submit,
    TransferEnded,
)
from worker.commands import Abort, CancelTransfer, Failed, GatewayLost, Tokens
from worker.followers.follower_processes import FollowerProcesses
from worker.host import WorkerHost
from worker.kv import NICENESS, make_sender, open_rank
from worker.load import with_transfers
from worker.runtime import WorkerRuntime
from worker.spans import log_failure, log_leg, open_spans

_logger = logging.getLogger(__name__)


class PrefillControl:
    """Wires the loop, the sender and the host together; lives in one event loop."""

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
            on_message=self._on_message, on_peer_down=self._on_peer_down,
        )  # fmt: skip
        send = by_worker(data_plane.wrap(self._host.server.send))
        remotes = []
        if followers is not None:
            remotes = [
                RemoteSender(partial(followers.send, rank), send, config.lease_s)
                for rank in range(1, followers.size)
            ]
        self._sender = RankedSender(
            make_sender(config, engine, data_plane, epoch, send),
            remotes,
            num_kv_heads=engine.model_config.num_kv_heads,
        )
        self._metrics = TransferMetrics()
        self._congested: frozenset[str] = frozenset()
        self._loop = PrefillLoop(engine, config.kv_layer_groups)
        self._runtime: WorkerRuntime[Command, Event] = WorkerRuntime(
            self._loop,
            self._host,
            on_events=self._on_events,
            poll=self._poll,
            poll_fileno=self._transport.connections_fileno(),
            niceness=NICENESS["prefill"],
            load=self._load,
            drain_s=config.drain_s,
        )
        if followers is not None:
            followers.on_lost = self._runtime.fail
            followers.on_report = lambda rank, report: self._on_report(remotes[rank - 1], report)
        if config.kv_layer_groups > 1:
            self._loop.emit = self._runtime.emit
        engine.grammars.on_ready = self._runtime.wake
        self._spans = open_spans(config)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``; raises what the model thread raised."""
        try:
            await self._runtime.run(stop)
        finally:
            self._transport.close()
            if self._spans is not None:
                await asyncio.to_thread(self._spans.close)

    def _on_message(self, peer_id: str, message: AnyMessage) -> None:
        if isinstance(message, PrefillRequest):
            # Not by way of the model thread: a step may outlast the time a Grant is kept for us.
            with suppress(ValueError):  # the id is in use; the loop answers that
                self._sender.expect(message.transfer_id, message.decode, message.ttl_s)
            self._runtime.post(Submit(message, peer_id))
            if self._spans is not None:
                self._spans.on_request(message)
            log_leg(_logger, message)
            self._runtime.poll_soon()
        elif isinstance(message, AbortRequest):
            self._runtime.post(Abort(message.transfer_id))
            if self._spans is not None:
                self._spans.forget(message.transfer_id)
        elif isinstance(message, TransferMessage):
            if isinstance(message, Grant):
                self._runtime.post(Granted(message.transfer_id))
            self._sender.on_message(peer_id, message)
            self._runtime.poll_soon()
        else:
            _logger.warning("unexpected message peer=%s type=%s", peer_id, type(message).__name__)

    def _on_report(self, remote: RemoteSender, report: SendReport) -> None:
        remote.on_report(report)
        self._runtime.poll_soon()

    def _on_peer_down(self, peer_id: str) -> None:
        self._runtime.post(GatewayLost(peer_id))
        self._sender.on_peer_down(peer_id)
        self._runtime.poll_soon()

    def _on_events(self, events: list[Event]) -> None:
        sender = self._sender
        for event in events:
            match event:
                case Tokens():
                    self._host.server.send(event.gateway_id, StepOutput(outputs=event.outputs))
                    if self._spans is not None:
                        self._spans.on_outputs(event.outputs, is_prefill=True)
                case SendBlocks():
                    if self._spans is not None:
                        self._spans.on_transfer_begun(event.transfer_id)
                    sender.submit(
                        event.transfer_id, event.first_index, event.block_ids, event.part,
                        step=event.step,
                    )  # fmt: skip
                case FinishTransfer():
                    sender.finish(
                        event.transfer_id,
                        first_token_id=event.first_token_id,
                        finished=event.finished,
                    )
                case CancelTransfer():
                    sender.cancel(event.transfer_id, "cancelled", "the request was given up")
                case Failed():
                    self._host.server.send(event.gateway_id, event.message)
                    self._on_failed(event.message)

    def _poll(self) -> bool:
        for event in self._sender.poll():
            self._on_transfer_over(event)
            why = f"{event.code}: {event.message}" if isinstance(event, SendFailed) else None
            self._runtime.post(TransferEnded(event.transfer_id, why))
        congested = self._sender.congested_receivers()
        if congested != self._congested:
            self._congested = congested
            self._runtime.post(Congestion(congested))
        return self._sender.num_open > 0

    def _on_transfer_over(self, event: SenderEvent) -> None:
        if isinstance(event, SendDone):
            self._metrics.observe(event)
        else:
            self._metrics.observe_failure(event.code)
            ids = about(transfer_id=event.transfer_id, code=event.code)
            _logger.info("kv transfer failed %s", event.message, extra=ids)
        if self._spans is None:
            return
        if isinstance(event, SendDone):
            moved = {
                "pdmesh.kv_bytes": event.num_bytes,
                "pdmesh.kv_hidden_s": event.hidden_s,
                "pdmesh.kv_exposed_s": event.exposed_s,
            }
            self._spans.on_transfer_done("kv transfer", event.transfer_id, moved)
            self._spans.forget(event.transfer_id)
        else:
            self._spans.on_failed(event.transfer_id, event.code)

    def _on_failed(self, message: RequestFailed) -> None:
        log_failure(_logger, message)
        if self._spans is not None:
            self._spans.on_failed(message.transfer_id, message.code)

    def _load(self) -> LoadSnapshot:
        return with_transfers(self._loop.snapshot, self._sender.num_open, self._runtime.draining)
