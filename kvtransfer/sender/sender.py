"""The prefill worker's side: writes computed blocks into what a decode worker granted.

Sans-I/O apart from the transport it is given: single-threaded, no sleeping, every time from the
injected clock. The states are in ``state``; ``chunk_writer`` cuts and posts the writes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from kvtransfer.errors import WRITE_ABORTED, PeerLost, Unreachable
from kvtransfer.events import SenderEvent
from kvtransfer.lease import DEFAULT_LEASE_S, Clock, Lease, RenewalTimer, send_renewals
from kvtransfer.memory.layout import BlockLayout
from kvtransfer.memory.staging import StagingBlocks
from kvtransfer.outbox import Outbox, Send
from kvtransfer.sender.backlog import Backlog
from kvtransfer.sender.chunk_writer import ChunkWriter
from kvtransfer.sender.final_replies import FinalReplies
from kvtransfer.sender.grant import grant_fault, plan_grant
from kvtransfer.sender.not_open import NotOpen
from kvtransfer.sender.state import Outgoing, SendState, SendTrigger
from kvtransfer.transports.base import Transport
from mesh.messages import (
    Grant,
    LeaseRenew,
    PrefillDone,
    TransferAck,
    TransferCancel,
    TransferMessage,
)

_TIMER_INTERVAL_S = 0.01
_GRANTED = (SendState.WRITING, SendState.AWAIT_ACK)


class TransferSender:
    """Borrows the caller's blocks from ``submit`` until the transfer's SendDone or SendFailed."""

    def __init__(
        self,
        *,
        worker_id: str,
        epoch: int,
        fingerprint: str,
        transport: Transport,
        send: Send,
        layout: BlockLayout | None = None,
        rank: int = 0,
        num_parts: int = 1,
        staging: StagingBlocks | None = None,
        lease_s: float = DEFAULT_LEASE_S,
        clock: Clock = time.monotonic,
    ) -> None:
        """Borrow ``transport`` (the caller closes it) and ``send``, which must not call back.

        Args:
            worker_id: This worker's name.
            epoch: This start of it.
            fingerprint: Receivers of another one are refused.
            transport: Over the pool whose blocks are submitted.
            send: Queues a message to a receiver; False where it can't.
            layout: Of the pool's blocks; without it they are only ever written whole.
            rank: This rank of the worker's tensor-parallel group.
            num_parts: In how many parts (runs of layers) blocks are submitted.
            staging: Blocks of the pool for compressing; without it nothing is compressed.
            lease_s: How long a silent receiver is waited for.
            clock: Monotonic seconds.
        """
        self.worker_id = worker_id
        self.epoch = epoch
        self._fingerprint = fingerprint
        self._transport = transport
        self._send = send
        self._lease_s = lease_s
        self._clock = clock
        self._layout = layout or BlockLayout.opaque(transport.memory.block_bytes)
        self._num_parts = num_parts
        self._writer = ChunkWriter(
            transport, epoch, self._layout, rank, staging or StagingBlocks(), clock
        )
        self._outbox = Outbox(send, clock, lease_s)
        self._renewal = RenewalTimer(lease_s)
        self._not_open = NotOpen(self._outbox, epoch, lease_s / 2)
        self._final_replies = FinalReplies(self._outbox, self._not_open, epoch, clock)
        self._outgoing: dict[str, Outgoing] = {}
        self._events: list[SenderEvent] = []
        self._backlog = Backlog()
        self._next_timers_s = 0.0

    # ------------------------------------------------------------------ caller

    def expect(self, transfer_id: str, receiver_id: str, ttl_s: float) -> None:
        """A PrefillRequest arrived; its Grant may have come already or comes within ``ttl_s``.

        Raises:
            ValueError: the transfer is open already.
        """
        if transfer_id in self._outgoing:
            raise ValueError(f"transfer {transfer_id} is already expected")
        now_s = self._clock()
        outgoing = Outgoing(transfer_id, receiver_id, Lease(ttl_s, now_s + ttl_s))
        self._outgoing[transfer_id] = outgoing
        held, refusal = self._not_open.take_grant(transfer_id), self._not_open.refusal(transfer_id)
        if refusal is not None:  # D cancelled before the request came
            self._fail(outgoing, refusal.code, refusal.message)
        elif held is not None:
            self._on_grant(held[0], held[1])

    def submit(
        self,
        transfer_id: str,
        first_index: int,
        block_ids: Sequence[int],
        part: int | None = None,
    ) -> None:
        """Blocks ``first_index …`` are computed; they are written as soon as they are granted.

        Ignored once the transfer is over, which the caller may not have seen yet.

        Args:
            transfer_id: The hand-off.
            first_index: Logical index of the first block.
            block_ids: They must not change until the transfer's end.
            part: Which part of their rows is computed; None: all.

        Raises:
            ValueError: bad ids, a part submitted before, or a submit after ``finish``.
        """
        self._transport.memory.check_block_ids(block_ids)
        outgoing = self._outgoing.get(transfer_id)
        if outgoing is None or outgoing.state is SendState.DRAINING:
            return
        parts = range(self._num_parts) if part is None else (part,)
        digest = partial(self._writer.digest, self._num_parts)
        outgoing.submit(first_index, block_ids, parts, digest)
        self._match_grant(outgoing)

    def finish(self, transfer_id: str, *, first_token_id: int, finished: bool) -> None:
        """No more submits. PrefillDone follows when no write is in flight any more.

        Args:
            transfer_id: Ignored once the transfer is over.
            first_token_id: The token P sampled.
            finished: The answer ended at it: blocks not yet written are not sent at all.

        Raises:
            ValueError: called twice.
        """
        outgoing = self._outgoing.get(transfer_id)
        if outgoing is None or outgoing.state is SendState.DRAINING:
            return
        if outgoing.done is not None:
            raise ValueError(f"transfer {transfer_id} is already finished")
        outgoing.done = PrefillDone(
            transfer_id=transfer_id, first_token_id=first_token_id, finished=finished,
            num_chunks=0, sender_epoch=self.epoch,
        )  # fmt: skip
        outgoing.time.finish(self._clock())
        if finished:
            outgoing.pending.clear()
        if outgoing.grant is None:
            # Computed and still no Grant: D has a lease's time, not the whole request's.
            limit = Lease.start(self._lease_s, self._clock())
            if limit.deadline_s < outgoing.lease.deadline_s:
                outgoing.lease = limit
        self._advance(outgoing)

    def cancel(self, transfer_id: str, code: str, message: str) -> None:
        """Stop; SendFailed follows once no write is in flight. Unknown ids are ignored."""
        outgoing = self._outgoing.get(transfer_id)
        if outgoing is not None:
            self._fail(outgoing, code, message)

    def on_message(self, receiver_id: str, message: TransferMessage) -> None:
        """One control message from a decode worker; what does not fit is ignored or refused."""
        if isinstance(message, Grant):
            self._not_open.on_address(receiver_id, message.address)
            self._on_grant(receiver_id, message)
        elif isinstance(message, TransferCancel):
            self._on_cancel(receiver_id, message.transfer_id)
        elif isinstance(message, TransferAck):
            outgoing = self._find(receiver_id, message.transfer_id)
            if outgoing is not None and outgoing.is_announced:
                outgoing.is_acked = True
                self._advance(outgoing)
        elif isinstance(message, LeaseRenew):
            for transfer_id in message.transfer_ids:
                self._on_renewal(receiver_id, transfer_id)

    def on_peer_down(self, receiver_id: str) -> None:
        """The link to a receiver is gone: what it granted ends, its connection is torn down.

        Transfers without a grant wait on: the receiver may dial again and grant them.
        """
        self._outbox.drop(receiver_id)
        self._not_open.drop_receiver(receiver_id)
        self._drop_peer(receiver_id, "peer_down", f"lost the decode worker {receiver_id}")

    def poll(self) -> list[SenderEvent]:
        """Progress everything; every ~1 ms while ``num_open`` > 0, rarely otherwise."""
        self._outbox.poll()
        now_s = self._clock()
        if now_s >= self._next_timers_s:
            # Before any write: a process that was frozen must not go on under an expired lease.
            self._next_timers_s = now_s + _TIMER_INTERVAL_S
            self._run_timers(now_s)
        self._transport.poll_connections()
        if self._outgoing:
            self._settle_writes()
            self._write_pending()
            for outgoing in list(self._outgoing.values()):
                self._advance(outgoing)
        events, self._events = self._events, []
        return events

    @property
    def num_open(self) -> int:
        """Expected transfers without SendDone or SendFailed, and grants held for one."""
        return len(self._outgoing) + len(self._not_open)

    def congested_receivers(self) -> frozenset[str]:
        """Receivers for which no more prompts should be begun now, see ``Backlog``."""
        return self._backlog.congested(self._outgoing.values())

    # ------------------------------------------------------------------ messages

    def _on_grant(self, receiver_id: str, grant: Grant) -> None:
        transfer_id = grant.transfer_id
        outgoing = self._outgoing.get(transfer_id)
        fault = grant_fault(grant, self._fingerprint, self._transport)
        if outgoing is None:
            self._not_open.on_grant(receiver_id, grant, fault, self._clock())
        elif outgoing.receiver_id != receiver_id:
            text = "granted by another worker"
            self._final_replies.refuse(receiver_id, transfer_id, "wrong_receiver", text)
        elif outgoing.grant is not None:
            if outgoing.grant != grant:
                self._fail(outgoing, "duplicate_grant", "a second, different grant")
        elif outgoing.state is SendState.DRAINING:
            outgoing.grant = grant  # given up already: its Nack has a reader now
        elif outgoing.state is SendState.EXPECTED:
            outgoing.grant = grant
            outgoing.lease = Lease.start(grant.lease_s, self._clock())
            if fault is None:
                outgoing.plan = plan_grant(grant, self._layout, self._num_parts)
                if outgoing.plan is None:
                    fault = "bad_grant", "the pools do not go together"
            if fault is not None:
                self._fail(outgoing, *fault)
                return
            outgoing.move(SendTrigger.GRANT)
            self._route_to(outgoing, grant)
            self._match_grant(outgoing)
            self._advance(outgoing)

    def _on_cancel(self, receiver_id: str, transfer_id: str) -> None:
        outgoing = self._outgoing.get(transfer_id)
        if outgoing is None:
            self._not_open.on_cancel(receiver_id, transfer_id)
        elif outgoing.receiver_id == receiver_id:
            if outgoing.state is SendState.DRAINING:
                return  # the Nack follows when drained
            self._fail(outgoing, "cancelled", "cancelled by its receiver")
            self._advance(outgoing)

    def _on_renewal(self, receiver_id: str, transfer_id: str) -> None:
        """D still waits for it; where the final word was said, it got lost: say it again."""
        outgoing = self._outgoing.get(transfer_id)
        if outgoing is None:
            self._not_open.on_renewal(receiver_id, transfer_id)
        elif outgoing.receiver_id == receiver_id and outgoing.state in _GRANTED:
            outgoing.lease.renew(self._clock())
            if outgoing.state is SendState.AWAIT_ACK and outgoing.done is not None:
                self._outbox.post(receiver_id, outgoing.done)

    def _route_to(self, outgoing: Outgoing, grant: Grant) -> None:
        """Use the grant's endpoint; another address: the old one is dead (restart or fence)."""
        route = self._writer.route(outgoing.receiver_id)
        if route is not None and route.address == grant.address:
            return
        if route is not None:
            self._drop_peer(
                outgoing.receiver_id, "superseded", "the receiver replaced its endpoint", outgoing
            )
        self._writer.set_route(outgoing.receiver_id, grant.address)

    # ------------------------------------------------------------------ progress

    def _match_grant(self, outgoing: Outgoing) -> None:
        """Drop pending blocks that D already has; fail where P computed more than was granted."""
        grant = outgoing.grant
        if grant is None:
            return
        outgoing.drop_below(grant.first_index)
        if not outgoing.covers(grant):
            self._fail(outgoing, "grant_too_small", "more blocks were computed than granted")

    def _settle_writes(self) -> None:
        for outgoing in list(self._outgoing.values()):
            if outgoing.in_flight:
                try:
                    self._writer.settle(outgoing)
                except PeerLost as error:
                    self._drop_peer(outgoing.receiver_id, error.code, str(error))

    def _write_pending(self) -> None:
        writing = [o for o in self._outgoing.values() if o.state is SendState.WRITING]
        for outgoing, error in self._writer.write_some(writing):
            self._drop_peer(outgoing.receiver_id, error.code, str(error))

    def _advance(self, outgoing: Outgoing) -> None:
        """Take the endings that need no outside event: done, drained."""
        if outgoing.in_flight:
            self._final_replies.announce(outgoing)
            return
        if outgoing.state is SendState.DRAINING:
            self._close(outgoing, SendTrigger.DRAINED)
        elif outgoing.done is not None and outgoing.done.finished:
            if outgoing.state in (SendState.EXPECTED, SendState.WRITING):
                self._final_replies.say_done(outgoing, outgoing.done)
                self._close(outgoing, SendTrigger.NOTHING_TO_SEND)
        elif outgoing.done is not None and outgoing.state is SendState.WRITING:
            assert outgoing.grant is not None
            if outgoing.pending:
                return
            if not outgoing.has_written_all():
                self._fail(outgoing, "incomplete", "fewer blocks were computed than granted")
                self._close(outgoing, SendTrigger.DRAINED)
                return
            if not outgoing.is_acked:
                self._final_replies.say_done(outgoing, outgoing.done)
            outgoing.move(SendTrigger.ALL_WRITTEN)
        if outgoing.state is SendState.AWAIT_ACK and outgoing.is_acked:
            self._close(outgoing, SendTrigger.ACK)

    # ------------------------------------------------------------------ endings

    def _fail(self, outgoing: Outgoing, code: str, message: str) -> None:
        if outgoing.state is not SendState.DRAINING:
            outgoing.move(SendTrigger.FAIL)
            outgoing.failure = (code, message)
            outgoing.pending.clear()
            outgoing.lease = Lease.start(self._lease_s, self._clock())

    def _drop_peer(
        self, receiver_id: str, code: str, message: str, spared: Outgoing | None = None
    ) -> None:
        """Tear the connection down; every transfer that used it fails, with no write in flight."""
        self._writer.drop_route(receiver_id)
        for outgoing in list(self._outgoing.values()):
            if outgoing.receiver_id != receiver_id or outgoing is spared:
                continue
            if outgoing.state is SendState.EXPECTED:
                continue
            if code == "peer_down" or outgoing.state is SendState.WRITING:
                self._fail(outgoing, code, message)
            is_told = code not in ("peer_down", Unreachable.code)
            if outgoing.in_flight and outgoing.state is SendState.DRAINING and is_told:
                outgoing.failure = (WRITE_ABORTED, message)
            self._writer.forget(outgoing)
            self._advance(outgoing)

    def _close(self, outgoing: Outgoing, trigger: SendTrigger) -> None:
        outgoing.move(trigger)
        del self._outgoing[outgoing.transfer_id]
        self._events.append(self._final_replies.close(outgoing))

    # ------------------------------------------------------------------ timers

    def _run_timers(self, now_s: float) -> None:
        self._not_open.expire(now_s)
        for outgoing in list(self._outgoing.values()):
            if outgoing.lease.is_expired(now_s):
                self._on_lease_end(outgoing)
        if self._renewal.is_due(now_s):
            granted = [o for o in self._outgoing.values() if o.state in _GRANTED]
            send_renewals(self._send, [(o.receiver_id, o.transfer_id) for o in granted])

    def _on_lease_end(self, outgoing: Outgoing) -> None:
        if outgoing.state is SendState.EXPECTED:
            self._fail(outgoing, "no_grant", "the decode worker granted nothing in time")
        elif outgoing.state is SendState.WRITING:
            self._fail(outgoing, "lease_expired", "the decode worker gave no sign of life")
        elif outgoing.state is SendState.AWAIT_ACK:
            self._close(outgoing, SendTrigger.LEASE_END)
        elif outgoing.state is SendState.DRAINING and outgoing.in_flight:
            # A frozen receiver never takes the write; only tearing the connection down ends it.
            self._drop_peer(outgoing.receiver_id, "peer_lost", "a write did not end in time")

    def _find(self, receiver_id: str, transfer_id: str) -> Outgoing | None:
        outgoing = self._outgoing.get(transfer_id)
        return outgoing if outgoing and outgoing.receiver_id == receiver_id else None
