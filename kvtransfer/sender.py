"""The prefill worker's side: writes computed blocks into what a decode worker granted.

Sans-I/O apart from the transport it is given: single-threaded, no sleeping, every time from the
injected clock. The states are in ``sender_state``; ``chunk_writer`` cuts and posts the writes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from kvtransfer.chunk_writer import MAX_BACKLOG_BYTES, ChunkWriter
from kvtransfer.errors import WRITE_ABORTED, PeerLost, Unreachable
from kvtransfer.events import SendDone, SenderEvent, SendFailed
from kvtransfer.grant import grant_fault, plan_grant
from kvtransfer.held_grants import HeldGrants
from kvtransfer.layout import BlockLayout
from kvtransfer.lease import DEFAULT_LEASE_S, Clock, Lease, RenewalTimer
from kvtransfer.outbox import Outbox, Send
from kvtransfer.sender_state import Outgoing, SendState, SendTrigger
from kvtransfer.staging import StagingBlocks
from kvtransfer.tombstones import Tombstones
from kvtransfer.transport import Transport
from mesh.messages import (
    Grant,
    LeaseRenew,
    PrefillDone,
    TransferAck,
    TransferCancel,
    TransferMessage,
    TransferNack,
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
        self._held = HeldGrants(lease_s / 2)
        self._tombstones = Tombstones()
        self._outgoing: dict[str, Outgoing] = {}
        self._events: list[SenderEvent] = []
        self._congested: frozenset[str] = frozenset()
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
        held = self._held.take(transfer_id)
        word = self._tombstones.get(transfer_id)
        if isinstance(word, TransferNack):  # D cancelled before the request came
            self._fail(outgoing, word.code, word.message)
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
        indices = range(first_index, first_index + len(block_ids))
        new = {(index, each) for index in indices for each in parts}
        if outgoing.done is not None or first_index < 0 or not outgoing.submitted.isdisjoint(new):
            raise ValueError(f"blocks {indices} were submitted before, or after finish")
        outgoing.submitted |= new
        for each in parts:
            outgoing.pending.extend(
                (each, index, block) for index, block in zip(indices, block_ids, strict=True)
            )
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
            transfer_id=transfer_id, first_token_id=first_token_id, finished=finished, num_chunks=0
        )
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
            # A held grant for an older endpoint would bring the dead route back when expected.
            for transfer_id in self._held.take_other_addresses(receiver_id, message.address):
                self._nack(receiver_id, transfer_id, "superseded", "the endpoint was replaced")
            self._on_grant(receiver_id, message)
        elif isinstance(message, TransferCancel):
            self._on_cancel(receiver_id, message.transfer_id)
        elif isinstance(message, TransferAck):
            outgoing = self._find(receiver_id, message.transfer_id)
            if outgoing is not None and outgoing.state is SendState.AWAIT_ACK:
                self._close(outgoing, SendTrigger.ACK)
        elif isinstance(message, LeaseRenew):
            for transfer_id in message.transfer_ids:
                self._on_renewal(receiver_id, transfer_id)

    def on_peer_down(self, receiver_id: str) -> None:
        """The link to a receiver is gone: everything for it ends, its connection is torn down."""
        self._outbox.drop(receiver_id)
        self._held.drop_receiver(receiver_id)
        self._drop_peer(receiver_id, "peer_down", f"lost the decode worker {receiver_id}")

    def poll(self) -> list[SenderEvent]:
        """Progress everything; every ~1 ms while ``num_open`` > 0, rarely otherwise."""
        self._outbox.poll()
        now_s = self._clock()
        if now_s >= self._next_timers_s:
            # Before any write: a process that was frozen must not go on under an expired lease.
            self._next_timers_s = now_s + _TIMER_INTERVAL_S
            self._run_timers(now_s)
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
        return len(self._outgoing) + len(self._held)

    def congested_receivers(self) -> frozenset[str]:
        """Receivers before which more computed KV waits than their link carries at once.

        A receiver stays in it until half of that is gone.
        """
        backlog: dict[str, int] = {}
        for outgoing in self._outgoing.values():
            if outgoing.state is SendState.WRITING and outgoing.plan is not None:
                part_bytes = len(outgoing.plan.local) * outgoing.plan.stride // self._num_parts
                waiting = len(outgoing.pending) * part_bytes
                backlog[outgoing.receiver_id] = backlog.get(outgoing.receiver_id, 0) + waiting
        self._congested = frozenset(
            receiver_id
            for receiver_id, num_bytes in backlog.items()
            if num_bytes > MAX_BACKLOG_BYTES // (2 if receiver_id in self._congested else 1)
        )
        return self._congested

    # ------------------------------------------------------------------ messages

    def _on_grant(self, receiver_id: str, grant: Grant) -> None:
        transfer_id = grant.transfer_id
        outgoing = self._outgoing.get(transfer_id)
        fault = grant_fault(grant, self._fingerprint, self._transport)
        if outgoing is None:
            self._answer_unexpected_grant(receiver_id, grant, fault)
        elif outgoing.receiver_id != receiver_id:
            self._nack(receiver_id, transfer_id, "wrong_receiver", "granted by another worker")
        elif outgoing.grant is not None:
            if outgoing.grant != grant:
                self._fail(outgoing, "duplicate_grant", "a second, different grant")
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

    def _answer_unexpected_grant(
        self, receiver_id: str, grant: Grant, fault: tuple[str, str] | None
    ) -> None:
        word = self._tombstones.get(grant.transfer_id)
        if word is not None:
            self._outbox.post(receiver_id, word)
        elif fault is not None:
            self._nack(receiver_id, grant.transfer_id, *fault)
        elif not self._held.add(receiver_id, grant, self._clock()):
            self._nack(receiver_id, grant.transfer_id, "unknown", "too many grants are waiting")

    def _on_cancel(self, receiver_id: str, transfer_id: str) -> None:
        outgoing = self._outgoing.get(transfer_id)
        if outgoing is None:
            self._held.take(transfer_id)
            word = self._tombstones.get(transfer_id)
            if isinstance(word, TransferNack):
                self._outbox.post(receiver_id, word)
            else:
                self._nack(receiver_id, transfer_id, "cancelled", "cancelled by its receiver")
        elif outgoing.receiver_id == receiver_id:
            if outgoing.state is SendState.DRAINING:
                return  # the Nack follows when drained
            self._fail(outgoing, "cancelled", "cancelled by its receiver")
            self._advance(outgoing)

    def _on_renewal(self, receiver_id: str, transfer_id: str) -> None:
        """D still waits for it; where the final word was said, it got lost: say it again."""
        outgoing = self._outgoing.get(transfer_id)
        if outgoing is None:
            word = self._tombstones.get(transfer_id)
            if word is not None:
                self._outbox.post(receiver_id, word)
            elif transfer_id not in self._held:
                self._nack(receiver_id, transfer_id, "unknown", "no grant of it came")
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
        self._writer.set_route(outgoing.receiver_id, grant.address, grant.epoch)

    # ------------------------------------------------------------------ progress

    def _match_grant(self, outgoing: Outgoing) -> None:
        """Drop pending blocks that D already has; fail where P computed more than was granted."""
        grant = outgoing.grant
        if grant is None:
            return
        if any(index < grant.first_index for _, index, _ in outgoing.pending):
            kept = [entry for entry in outgoing.pending if entry[1] >= grant.first_index]
            outgoing.pending.clear()
            outgoing.pending.extend(kept)
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
            return
        if outgoing.state is SendState.DRAINING:
            self._close(outgoing, SendTrigger.DRAINED)
        elif outgoing.done is not None and outgoing.done.finished:
            if outgoing.state in (SendState.EXPECTED, SendState.WRITING):
                self._send_done(outgoing, outgoing.done)
                self._close(outgoing, SendTrigger.NOTHING_TO_SEND)
        elif outgoing.done is not None and outgoing.state is SendState.WRITING:
            assert outgoing.grant is not None
            if outgoing.pending:
                return
            if outgoing.num_written != len(outgoing.grant.block_ids) * self._num_parts:
                self._fail(outgoing, "incomplete", "fewer blocks were computed than granted")
                self._close(outgoing, SendTrigger.DRAINED)
                return
            self._send_done(outgoing, outgoing.done)
            outgoing.move(SendTrigger.ALL_WRITTEN)

    def _send_done(self, outgoing: Outgoing, done: PrefillDone) -> None:
        outgoing.done = msgspec.structs.replace(done, num_chunks=outgoing.next_seq)
        self._outbox.post(outgoing.receiver_id, outgoing.done)

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
        if outgoing.failure is None:
            assert outgoing.done is not None
            self._tombstones.add(outgoing.transfer_id, outgoing.done)
            self._events.append(
                SendDone(
                    outgoing.transfer_id,
                    num_bytes=outgoing.num_bytes,
                    hidden_s=outgoing.time.hidden_s,
                    exposed_s=outgoing.time.exposed_s,
                )
            )
            return
        code, message = outgoing.failure
        nack = TransferNack(transfer_id=outgoing.transfer_id, code=code, message=message)
        self._tombstones.add(outgoing.transfer_id, nack)
        if outgoing.grant is not None and code != "peer_down":
            self._outbox.post(outgoing.receiver_id, nack)
        self._events.append(SendFailed(outgoing.transfer_id, code, message))

    def _nack(self, receiver_id: str, transfer_id: str, code: str, message: str) -> None:
        """Refuse a transfer that is not open here; once said, it stays refused."""
        nack = TransferNack(transfer_id=transfer_id, code=code, message=message)
        self._outbox.post(receiver_id, nack)
        if transfer_id not in self._outgoing:
            self._tombstones.add(transfer_id, nack)

    # ------------------------------------------------------------------ timers

    def _run_timers(self, now_s: float) -> None:
        for receiver_id, grant in self._held.take_expired(now_s):
            self._nack(receiver_id, grant.transfer_id, "unknown", "no prefill request came for it")
        for outgoing in list(self._outgoing.values()):
            if outgoing.lease.is_expired(now_s):
                self._on_lease_end(outgoing)
        if self._renewal.is_due(now_s):
            self._renew_leases()

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

    def _renew_leases(self) -> None:
        by_peer: dict[str, list[str]] = {}
        for outgoing in self._outgoing.values():
            if outgoing.state in _GRANTED:
                by_peer.setdefault(outgoing.receiver_id, []).append(outgoing.transfer_id)
        for receiver_id, transfer_ids in by_peer.items():
            self._send(receiver_id, LeaseRenew(transfer_ids=tuple(transfer_ids)))

    def _find(self, receiver_id: str, transfer_id: str) -> Outgoing | None:
        outgoing = self._outgoing.get(transfer_id)
        return outgoing if outgoing and outgoing.receiver_id == receiver_id else None
