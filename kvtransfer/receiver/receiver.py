"""The decode worker's side: grants blocks, verifies what arrives, quarantines the rest.

Sans-I/O apart from the transport it is given: single-threaded, no sleeping, every time from the
injected clock. The states are in ``state``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from kvtransfer.errors import WRITE_ABORTED, TransportError, Unreachable
from kvtransfer.events import BlocksReleased, Committed, ReceiveFailed, ReceiverEvent
from kvtransfer.lease import DEFAULT_LEASE_S, Clock, Lease, RenewalTimer, send_renewals
from kvtransfer.memory.layout import MAX_GRANT_BLOCKS, BlockLayout
from kvtransfer.outbox import Outbox, Send
from kvtransfer.receiver.chunk import accept_chunk, decode_header
from kvtransfer.receiver.grant import make_grant
from kvtransfer.receiver.state import Incoming, ReceiveState, ReceiveTrigger
from kvtransfer.transports.base import Arrival, Transport
from mesh.errors import ProtocolError
from mesh.kv_heads import Heads
from mesh.messages import (
    LeaseRenew,
    PeerRef,
    PrefillDone,
    TransferAck,
    TransferCancel,
    TransferMessage,
    TransferNack,
)

logger = logging.getLogger(__name__)

FENCE_SETTLE_S = 0.1
"""A system call that had pinned pages when the fence fell may still copy those few pages."""
LATE_CHUNKS_S = 2.0
"""After P's last word, how long its chunk headers may still be on their way."""
MAX_POLL_ROUNDS = 16
"""Of arrivals in one poll: what arrived is checked before more is taken, while it is hot."""
MAX_POLL_S = 0.005
"""Then leases and the rest of the control loop get their turn."""
MAX_CODE = 64
MAX_TEXT = 512
"""A peer's words go into logs and to clients."""
_TIMER_INTERVAL_S = 0.01


class TransferReceiver:
    """Owns every block handed to ``open`` until Committed or BlocksReleased returns it."""

    def __init__(
        self,
        *,
        worker_id: str,
        epoch: int,
        fingerprint: str,
        transport: Transport,
        send: Send,
        layout: BlockLayout | None = None,
        encoding: str = "",
        lease_s: float = DEFAULT_LEASE_S,
        clock: Clock = time.monotonic,
    ) -> None:
        """Borrow ``transport`` (the caller closes it) and ``send``, which must not call back.

        Args:
            worker_id: This worker's name.
            epoch: This start of it.
            fingerprint: Senders of another one are refused.
            transport: Over the pool whose blocks ``open`` grants.
            send: Queues a message to a sender; False where it can't.
            layout: Of the pool's blocks; without it they are only ever written whole.
            encoding: How senders that can should compress what they write; empty: not at all.
            lease_s: How long a silent sender is waited for.
            clock: Monotonic seconds.
        """
        self.worker_id = worker_id
        self.epoch = epoch
        self._fingerprint = fingerprint
        self._transport = transport
        self._send = send
        self._layout = layout or BlockLayout.opaque(transport.memory.block_bytes)
        self._encoding = encoding
        self._lease_s = lease_s
        self._clock = clock
        self._outbox = Outbox(send, clock, lease_s)
        self._renewal = RenewalTimer(lease_s)
        self._incoming: dict[str, Incoming] = {}
        self._peer_epochs: dict[str, int] = {}
        self._events: list[ReceiverEvent] = []
        self._next_timers_s = 0.0
        self.num_refused_chunks = 0
        self.num_fences = 0

    # ------------------------------------------------------------------ caller

    def open(
        self,
        transfer_id: str,
        sender: PeerRef,
        block_ids: Sequence[int],
        first_index: int,
        *,
        rank: int = 0,
        heads: Heads | None = None,
    ) -> None:
        """Grant ``block_ids`` for logical blocks ``first_index …`` to one start of one sender.

        Whatever goes wrong with the peer is told by ``poll``, never raised.

        Args:
            transfer_id: Names the hand-off, and the sender's rank where there are several.
            sender: Who writes.
            block_ids: Owned by this transfer until ``poll`` gives them back.
            first_index: Logical index of the first one.
            rank: The sender's tensor-parallel rank.
            heads: What it should write of each block; None: all that the block holds.

        Raises:
            ValueError: a duplicate transfer, bad block ids, or heads that this pool does not hold.
        """
        if transfer_id in self._incoming:
            raise ValueError(f"transfer {transfer_id} is already open")
        if len(block_ids) > MAX_GRANT_BLOCKS or first_index < 0:
            raise ValueError("too many blocks or a negative index in one grant")
        if heads is not None and not self._layout.heads.holds(heads):
            raise ValueError(f"{heads} are not all in this pool")
        self._transport.memory.check_block_ids(block_ids)
        now_s = self._clock()
        incoming = Incoming(
            transfer_id, sender, tuple(block_ids), first_index, Lease.start(self._lease_s, now_s),
            rank=rank, heads=heads, encoding=self._encoding,
        )  # fmt: skip
        self._incoming[transfer_id] = incoming
        known_epoch = self._peer_epochs.get(sender.worker_id, sender.epoch)
        if sender.epoch < known_epoch:
            self._fail(incoming, "stale_epoch", "the sender has restarted since")
            return
        self._peer_epochs[sender.worker_id] = sender.epoch
        if sender.epoch > known_epoch:
            self._fence(sender.worker_id, "peer_restarted", older_than=sender.epoch)
        self._send_grant(incoming)

    def cancel(self, transfer_id: str) -> None:
        """Give a transfer up; BlocksReleased follows, no ReceiveFailed. Unknown ids are ignored."""
        incoming = self._incoming.get(transfer_id)
        if incoming is not None:
            self._abandon(incoming)

    def on_message(self, sender_id: str, message: TransferMessage) -> None:
        """One control message from a prefill worker; what does not fit is ignored."""
        if isinstance(message, LeaseRenew):
            for transfer_id in message.transfer_ids:
                incoming = self._find(sender_id, transfer_id)
                if incoming is not None and incoming.state is ReceiveState.GRANTED:
                    incoming.lease.renew(self._clock())
        elif isinstance(message, PrefillDone | TransferNack):
            incoming = self._find(sender_id, message.transfer_id)
            if incoming is not None:
                self._on_final_word(incoming, message)

    def on_peer_up(self, sender_id: str, transports: Sequence[str], host_id: str) -> None:
        """The link to a sender is up: its grants can go out.

        Args:
            sender_id: Who it is.
            transports: What it writes over.
            host_id: Its ``transports.socket.shm.host_id``.
        """
        self._transport.meet(sender_id, transports, host_id)
        for incoming in self._of_peer(sender_id):
            if incoming.state is ReceiveState.OPENING:
                self._send_grant(incoming)

    def on_peer_down(self, sender_id: str, code: str = "peer_down", reason: str = "") -> None:
        """The link to a sender is gone. It may be frozen rather than dead, so it is fenced."""
        self._outbox.drop(sender_id)
        self._take_arrivals()
        self._fence(sender_id, code, reason=reason)
        self._transport.say_goodbye(sender_id)

    def poll(self) -> list[ReceiverEvent]:
        """Progress everything; every ~1 ms while ``num_open`` > 0, rarely otherwise."""
        self._outbox.poll()
        self._take_arrivals()
        if self._incoming:
            now_s = self._clock()
            if now_s >= self._next_timers_s:
                self._next_timers_s = now_s + _TIMER_INTERVAL_S
                self._run_timers(now_s)
        events, self._events = self._events, []
        return events

    @property
    def num_open(self) -> int:
        """Transfers that are not committed and whose blocks are not released."""
        return len(self._incoming)

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks of failed or cancelled transfers that a peer might still write."""
        held = (ReceiveState.CANCELLING, ReceiveState.FENCED)
        return sum(len(i.block_ids) for i in self._incoming.values() if i.state in held)

    # ------------------------------------------------------------------ grant

    def _send_grant(self, incoming: Incoming) -> None:
        peer_id = incoming.sender.worker_id
        if not self._transport.has_met(peer_id):
            return  # its link is not up yet
        try:
            address = self._transport.open_endpoint(peer_id)
        except TransportError as error:
            self._fail(incoming, error.code, str(error))
            return
        grant = make_grant(
            incoming, self._layout,
            fingerprint=self._fingerprint, epoch=self.epoch, lease_s=self._lease_s,
            transport=self._transport.name_for(peer_id), address=address,
        )  # fmt: skip
        self._transport.grant_writes(peer_id, incoming.block_ids)
        if self._send(peer_id, grant):
            incoming.move(ReceiveTrigger.GRANT_SENT)
            incoming.lease = Lease.start(self._lease_s, self._clock())
        else:
            self._transport.revoke_writes(peer_id, incoming.block_ids)

    # ------------------------------------------------------------------ data

    def _take_arrivals(self) -> None:
        until_s = self._clock() + MAX_POLL_S
        for _ in range(MAX_POLL_ROUNDS):
            arrivals = self._transport.poll_arrivals()
            for arrival in arrivals:
                self._on_chunk(arrival)
            if not arrivals or self._clock() >= until_s:
                break

    def _on_chunk(self, arrival: Arrival) -> None:
        peer_id = arrival.peer_id
        try:
            header = decode_header(arrival.header)
        except ProtocolError as error:
            # It can't be told whose blocks these were, so none of this peer's can be trusted.
            self.num_refused_chunks += 1
            logger.warning("chunk refused peer=%s code=%s", peer_id, error.code)
            for incoming in self._of_peer(peer_id):
                if incoming.state is ReceiveState.GRANTED:
                    self._fail(incoming, error.code, "a write came with an unreadable header")
            return
        found = self._find(peer_id, header.transfer_id)
        if found is None:
            self.num_refused_chunks += 1
            self._outbox.post(peer_id, TransferCancel(transfer_id=header.transfer_id))
            return
        if found.state is not ReceiveState.GRANTED:
            return  # already given up; its blocks stay quarantined until the final word
        memory = self._transport.memory
        fault = accept_chunk(header, arrival.digests, found, memory, self._layout, self.epoch)
        if fault is not None:
            self.num_refused_chunks += 1
            self._fail(found, fault, f"chunk {header.seq} was refused")
            return
        found.lease.renew(self._clock())
        self._commit_if_complete(found)

    def _commit_if_complete(self, incoming: Incoming) -> None:
        if incoming.is_complete:
            assert incoming.announced is not None
            self._commit(incoming, incoming.announced)

    def _commit(self, incoming: Incoming, done: PrefillDone) -> None:
        incoming.move(ReceiveTrigger.COMPLETE)
        self._forget(incoming)
        self._outbox.post(incoming.sender.worker_id, TransferAck(transfer_id=incoming.transfer_id))
        heard_s = incoming.heard_done_s
        late_s = 0.0 if heard_s is None else self._clock() - heard_s
        self._events.append(Committed(incoming.transfer_id, done, late_s))

    # ------------------------------------------------------------------ endings

    def _on_final_word(self, incoming: Incoming, message: PrefillDone | TransferNack) -> None:
        """After either message the sender has no write in flight and will start none.

        Two exceptions: it tore a connection down under a write, and bytes may wait in a socket
        here; or it could not reach the endpoint, which must be replaced by another one.
        """
        if message.sender_epoch != incoming.sender.epoch:
            # Another start of P can't speak for what the one that was granted still has in flight.
            if message.sender_epoch > incoming.sender.epoch:
                self._fence(incoming.sender.worker_id, "peer_restarted")
            return
        if isinstance(message, PrefillDone) and incoming.heard_done_s is None:
            incoming.heard_done_s = self._clock()
        if isinstance(message, PrefillDone) and not message.is_quiet:
            if incoming.state is ReceiveState.GRANTED and not incoming.is_quiet:
                incoming.announced = message
                self._commit_if_complete(incoming)
            return
        code = message.code if isinstance(message, TransferNack) else ""
        if code in (WRITE_ABORTED, Unreachable.code):
            if incoming.state in (ReceiveState.GRANTED, ReceiveState.CANCELLING):
                if code == Unreachable.code:
                    self._transport.avoid(incoming.sender.worker_id)
                self._fence(incoming.sender.worker_id, code)
        elif incoming.state is ReceiveState.CANCELLING:
            self._release(incoming, ReceiveTrigger.FINAL_WORD)
        elif incoming.state is ReceiveState.GRANTED:
            if isinstance(message, TransferNack):
                self._report(incoming, message.code[:MAX_CODE], message.message[:MAX_TEXT])
                self._release(incoming, ReceiveTrigger.FINAL_WORD)
            elif message.finished:
                self._commit(incoming, message)
            elif not incoming.is_quiet:
                incoming.announced = message
                incoming.lease = Lease.start(min(self._lease_s, LATE_CHUNKS_S), self._clock())
                self._take_arrivals()
                if incoming.state is ReceiveState.GRANTED:
                    self._commit_if_complete(incoming)

    def _fail(self, incoming: Incoming, code: str, message: str) -> None:
        self._report(incoming, code, message)
        self._abandon(incoming)

    def _report(self, incoming: Incoming, code: str, message: str) -> None:
        self._events.append(ReceiveFailed(incoming.transfer_id, code, message))

    def _abandon(self, incoming: Incoming) -> None:
        """Stop wanting it: at once where nobody can write, else ask P and quarantine meanwhile."""
        if incoming.state is ReceiveState.OPENING:
            self._release(incoming, ReceiveTrigger.ABANDON)
        elif incoming.state is ReceiveState.GRANTED:
            cancel = TransferCancel(transfer_id=incoming.transfer_id)
            self._outbox.post(incoming.sender.worker_id, cancel)
            if incoming.is_quiet:
                self._release(incoming, ReceiveTrigger.FINAL_WORD)
            else:
                incoming.move(ReceiveTrigger.ABANDON)
                incoming.lease = Lease.start(self._lease_s, self._clock())

    def _fence(
        self, peer_id: str, code: str, *, reason: str = "", older_than: int | None = None
    ) -> None:
        """Destroy what the peer writes through; every open transfer of it ends."""
        self.num_fences += 1
        is_proven = self._transport.fence(peer_id)
        for incoming in self._of_peer(peer_id):
            if older_than is not None and incoming.sender.epoch >= older_than:
                continue
            if incoming.state is ReceiveState.FENCED:
                # Reached only by an unproven fence: a later start of the peer replaced the writer.
                if older_than is not None and incoming.settle_at_s is None:
                    incoming.settle_at_s = self._clock() + FENCE_SETTLE_S
                continue
            if incoming.state is not ReceiveState.CANCELLING:
                self._report(incoming, code, reason or f"the sender {peer_id} was fenced off")
            if incoming.state is ReceiveState.OPENING:
                self._release(incoming, ReceiveTrigger.ABANDON)
            elif incoming.is_quiet:
                self._release(incoming, ReceiveTrigger.FINAL_WORD)
            else:
                incoming.move(ReceiveTrigger.FENCE)
                if is_proven or older_than is not None:
                    incoming.settle_at_s = self._clock() + FENCE_SETTLE_S
                else:
                    logger.error("fence of %s is no proof; its blocks stay quarantined", peer_id)

    def _release(self, incoming: Incoming, trigger: ReceiveTrigger) -> None:
        incoming.move(trigger)
        self._forget(incoming)
        self._events.append(BlocksReleased(incoming.transfer_id, incoming.block_ids))

    def _forget(self, incoming: Incoming) -> None:
        self._transport.revoke_writes(incoming.sender.worker_id, incoming.block_ids)
        del self._incoming[incoming.transfer_id]

    # ------------------------------------------------------------------ timers

    def _run_timers(self, now_s: float) -> None:
        for incoming in list(self._incoming.values()):
            if incoming.transfer_id not in self._incoming:
                continue  # ended by a fence a moment ago
            self._run_timer(incoming, now_s)
        if self._renewal.is_due(now_s):
            self._renew_leases()

    def _run_timer(self, incoming: Incoming, now_s: float) -> None:
        state, is_expired = incoming.state, incoming.lease.is_expired(now_s)
        if state is ReceiveState.FENCED:
            if incoming.settle_at_s is not None and now_s >= incoming.settle_at_s:
                self._release(incoming, ReceiveTrigger.SETTLE)
        elif state is ReceiveState.OPENING:
            if is_expired:
                self._fail(incoming, "peer_unreachable", "the grant could not be delivered")
            else:
                self._send_grant(incoming)
        elif is_expired and state is ReceiveState.CANCELLING:
            self._fence(incoming.sender.worker_id, "peer_fenced")
        elif is_expired and incoming.is_quiet:
            self._fail(incoming, "incomplete", "blocks are missing after the sender's last word")
        elif is_expired:
            self._fail(incoming, "lease_expired", "the sender gave no sign of life")

    def _renew_leases(self) -> None:
        granted = [i for i in self._incoming.values() if i.state is ReceiveState.GRANTED]
        send_renewals(self._send, [(i.sender.worker_id, i.transfer_id) for i in granted])

    # ------------------------------------------------------------------ lookup

    def _find(self, peer_id: str, transfer_id: str) -> Incoming | None:
        incoming = self._incoming.get(transfer_id)
        return incoming if incoming and incoming.sender.worker_id == peer_id else None

    def _of_peer(self, peer_id: str) -> list[Incoming]:
        return [i for i in self._incoming.values() if i.sender.worker_id == peer_id]
