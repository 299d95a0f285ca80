"""A follower's TransferReceiver: ``RemoteReceiver`` is for rank 0, ``ReceiverSide`` lives there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvtransfer.events import BlocksReleased, Committed, ReceiveFailed, ReceiverEvent
from kvtransfer.outbox import Outbox, Send
from kvtransfer.ranks.messages import (
    CancelReceive,
    Deliver,
    OpenReceive,
    Outgoing,
    PeerDown,
    PeerUp,
    ReceiveCommand,
    ReceiveCommitted,
    ReceiveLost,
    ReceiveReleased,
    ReceiveReport,
)
from kvtransfer.ranks.remote_sender import Tell
from kvtransfer.receiver.receiver import TransferReceiver
from mesh.kv_heads import Heads
from mesh.messages import PeerRef, TransferMessage


class RemoteReceiver:
    """Methods as of ``TransferReceiver``, whose effects come with the follower's reports."""

    def __init__(
        self,
        tell: Tell,
        send: Send,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Talk to the follower by ``tell`` and, for it, to senders by ``send``."""
        self._tell = tell
        self._outbox = Outbox(send, clock, lease_s)
        self._open: set[str] = set()
        self._events: list[ReceiverEvent] = []

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
        assert heads is not None, "a follower holds a part of the heads"
        if transfer_id in self._open:
            raise ValueError(f"transfer {transfer_id} is already open")
        self._open.add(transfer_id)
        self._tell(
            OpenReceive(
                transfer_id=transfer_id,
                sender=sender,
                block_ids=tuple(block_ids),
                first_index=first_index,
                rank=rank,
                heads=heads.bounds,
            )
        )

    def cancel(self, transfer_id: str) -> None:
        self._tell(CancelReceive(transfer_id=transfer_id))

    def on_message(self, sender_id: str, message: TransferMessage) -> None:
        self._tell(Deliver(peer_id=sender_id, message=message))

    def on_peer_up(self, sender_id: str, transports: Sequence[str], host_id: str) -> None:
        self._tell(PeerUp(peer_id=sender_id, transports=tuple(transports), host_id=host_id))

    def on_peer_down(self, sender_id: str, code: str = "peer_down", reason: str = "") -> None:
        self._outbox.drop(sender_id)
        self._tell(PeerDown(peer_id=sender_id, code=code, reason=reason))

    def on_report(self, report: ReceiveReport) -> None:
        """A message of the follower."""
        match report:
            case Outgoing():
                self._outbox.post(report.peer_id, report.message)
            case ReceiveCommitted():
                self._open.discard(report.transfer_id)
                self._events.append(Committed(report.transfer_id, report.done, report.late_s))
            case ReceiveLost():
                self._events.append(ReceiveFailed(report.transfer_id, report.code, report.message))
            case ReceiveReleased():
                self._open.discard(report.transfer_id)
                self._events.append(BlocksReleased(report.transfer_id, report.block_ids))

    def poll(self) -> list[ReceiverEvent]:
        self._outbox.poll()
        events, self._events = self._events, []
        return events

    @property
    def num_open(self) -> int:
        return len(self._open)


class ReceiverSide:
    """Obeys rank 0 in a follower's process."""

    def __init__(self, receiver: TransferReceiver, fileno: int | None, tell: Tell) -> None:
        """Borrow the receiver, whose messages go out as ``Outgoing``; ``tell`` reports."""
        self._receiver = receiver
        self._fileno = fileno
        self._tell = tell

    def on_message(self, command: ReceiveCommand) -> None:
        """See ``worker.follower.Side``."""
        match command:
            case Deliver():
                self._receiver.on_message(command.peer_id, command.message)
            case OpenReceive():
                self._receiver.open(
                    command.transfer_id, command.sender, command.block_ids, command.first_index,
                    rank=command.rank,
                    heads=Heads(start=command.heads[0], stop=command.heads[1]),
                )  # fmt: skip
            case CancelReceive():
                self._receiver.cancel(command.transfer_id)
            case PeerUp():
                self._receiver.on_peer_up(command.peer_id, command.transports, command.host_id)
            case PeerDown():
                self._receiver.on_peer_down(command.peer_id, command.code, command.reason)

    def poll(self) -> bool:
        """See ``Side``."""
        for event in self._receiver.poll():
            self._tell(_report(event))
        return self._receiver.num_open > 0

    def fileno(self) -> int | None:
        """See ``Side``."""
        return self._fileno


def _report(event: ReceiverEvent) -> ReceiveCommitted | ReceiveLost | ReceiveReleased:
    match event:
        case Committed(transfer_id=transfer_id):
            return ReceiveCommitted(transfer_id=transfer_id, done=event.done, late_s=event.late_s)
        case ReceiveFailed(transfer_id=transfer_id):
            return ReceiveLost(transfer_id=transfer_id, code=event.code, message=event.message)
        case BlocksReleased(transfer_id=transfer_id):
            return ReceiveReleased(transfer_id=transfer_id, block_ids=event.block_ids)
