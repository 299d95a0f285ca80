"""A follower's TransferSender: rank 0 has a ``RemoteSender``, the follower a ``SenderSide``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from kvtransfer.events import SendDone, SenderEvent, SendFailed
from kvtransfer.outbox import Outbox, Send
from kvtransfer.ranks.messages import (
    CancelSend,
    Congested,
    Deliver,
    Expect,
    FinishSend,
    Outgoing,
    PeerDown,
    SendCommand,
    SendEnded,
    SendReport,
    SubmitBlocks,
)
from kvtransfer.sender.sender import TransferSender
from mesh.messages import TransferMessage

Tell = Callable[[msgspec.Struct], object]


class RemoteSender:
    """Methods as of ``TransferSender``, whose effects come with the follower's reports."""

    def __init__(
        self,
        tell: Tell,
        send: Send,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Talk to the follower by ``tell`` and, for it, to receivers by ``send``."""
        self._tell = tell
        self._outbox = Outbox(send, clock, lease_s)
        self._open: set[str] = set()
        self._events: list[SenderEvent] = []
        self._congested: frozenset[str] = frozenset()
        self.step = 0
        """Number of the step that computed what is submitted next."""

    def expect(self, transfer_id: str, receiver_id: str, ttl_s: float) -> None:
        if transfer_id in self._open:
            raise ValueError(f"transfer {transfer_id} is already expected")
        self._open.add(transfer_id)
        self._tell(Expect(transfer_id=transfer_id, receiver_id=receiver_id, ttl_s=ttl_s))

    def submit(
        self, transfer_id: str, first_index: int, block_ids: Sequence[int], part: int | None = None
    ) -> None:
        self._tell(
            SubmitBlocks(
                transfer_id=transfer_id,
                first_index=first_index,
                block_ids=tuple(block_ids),
                part=part,
                step=self.step,
            )
        )

    def finish(self, transfer_id: str, *, first_token_id: int, finished: bool) -> None:
        self._tell(
            FinishSend(transfer_id=transfer_id, first_token_id=first_token_id, finished=finished)
        )

    def cancel(self, transfer_id: str, code: str, message: str) -> None:
        self._tell(CancelSend(transfer_id=transfer_id, code=code, message=message))

    def on_message(self, receiver_id: str, message: TransferMessage) -> None:
        self._tell(Deliver(peer_id=receiver_id, message=message))

    def on_peer_down(self, receiver_id: str) -> None:
        self._outbox.drop(receiver_id)
        self._tell(PeerDown(peer_id=receiver_id))

    def on_report(self, report: SendReport) -> None:
        """A message of the follower."""
        match report:
            case Outgoing():
                self._outbox.post(report.peer_id, report.message)
            case Congested():
                self._congested = frozenset(report.receiver_ids)
            case SendEnded(transfer_id=transfer_id):
                self._open.discard(transfer_id)
                self._events.append(
                    SendFailed(transfer_id, report.code, report.message)
                    if report.code
                    else SendDone(transfer_id, report.num_bytes, report.hidden_s, report.exposed_s)
                )

    def poll(self) -> list[SenderEvent]:
        self._outbox.poll()
        events, self._events = self._events, []
        return events

    @property
    def num_open(self) -> int:
        return len(self._open)

    def congested_receivers(self) -> frozenset[str]:
        return self._congested


class SenderSide:
    """Obeys rank 0 in a follower's process."""

    def __init__(
        self,
        sender: TransferSender,
        has_computed: Callable[[int, int | None], bool],
        fileno: int | None,
        tell: Tell,
    ) -> None:
        """Borrow the sender.

        Args:
            sender: This rank's; what it sends to peers goes out as ``Outgoing``.
            has_computed: Whether this rank's KV of a step, or of one part of it, is in memory.
            fileno: Of the transport's connections.
            tell: Queues a report to rank 0.
        """
        self._sender = sender
        self._has_computed = has_computed
        self._fileno = fileno
        self._tell = tell
        self._waiting: deque[SubmitBlocks | FinishSend] = deque()
        """In order, until this rank has come as far as rank 0."""
        self._congested: frozenset[str] = frozenset()

    def on_message(self, command: SendCommand) -> None:
        """See ``worker.follower.Side``."""
        match command:
            case SubmitBlocks() | FinishSend():
                self._waiting.append(command)
            case Deliver():
                self._sender.on_message(command.peer_id, command.message)
            case Expect():
                with suppress(ValueError):  # rank 0 has answered that
                    self._sender.expect(command.transfer_id, command.receiver_id, command.ttl_s)
            case CancelSend():
                self._sender.cancel(command.transfer_id, command.code, command.message)
            case PeerDown():
                self._sender.on_peer_down(command.peer_id)

    def poll(self) -> bool:
        """See ``Side``."""
        self._take_computed()
        for event in self._sender.poll():
            self._tell(_ended(event))
        congested = self._sender.congested_receivers()
        if congested != self._congested:
            self._congested = congested
            self._tell(Congested(receiver_ids=tuple(sorted(congested))))
        return self._sender.num_open > 0

    def fileno(self) -> int | None:
        """See ``Side``."""
        return self._fileno

    def _take_computed(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            if isinstance(first, SubmitBlocks):
                if not self._has_computed(first.step, first.part):
                    return
                self._sender.submit(
                    first.transfer_id, first.first_index, first.block_ids, first.part
                )
            else:
                self._sender.finish(
                    first.transfer_id,
                    first_token_id=first.first_token_id, finished=first.finished,
                )  # fmt: skip
            self._waiting.popleft()


def _ended(event: SenderEvent) -> SendEnded:
    if isinstance(event, SendFailed):
        return SendEnded(transfer_id=event.transfer_id, code=event.code, message=event.message)
    return SendEnded(
        transfer_id=event.transfer_id, num_bytes=event.num_bytes, hidden_s=event.hidden_s,
        exposed_s=event.exposed_s,
    )  # fmt: skip
