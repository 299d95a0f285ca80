"""One hand-off from a tensor-parallel prefill worker: the sender's half of ``rank_group``."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvtransfer.events import SendDone, SenderEvent, SendFailed


class SendGroup:
    """Joins the members' ends into that of one transfer: the blocks are free after the last."""

    def __init__(
        self, transfer_id: str, members: Iterable[str], cancel: Callable[[str, str, str], None]
    ) -> None:
        """Start with all members open.

        Args:
            transfer_id: The whole hand-off's.
            members: Transfer ids of the pairs of ranks; at least one.
            cancel: ``TransferSender.cancel`` of the member's rank.
        """
        self._transfer_id = transfer_id
        self._open = set(members)
        self._cancel = cancel
        self._failure: SendFailed | None = None
        self._num_bytes = 0
        self._hidden_s = self._exposed_s = 0.0
        if not self._open:
            raise ValueError("a group without members")

    def on_event(self, event: SenderEvent) -> SenderEvent | None:
        """What a member's end means for the hand-off: its end, if it was the last one's."""
        if event.transfer_id not in self._open:
            return None
        self._open.discard(event.transfer_id)
        if isinstance(event, SendDone):
            self._num_bytes += event.num_bytes
            self._hidden_s = max(self._hidden_s, event.hidden_s)
            self._exposed_s = max(self._exposed_s, event.exposed_s)
        elif self._failure is None:
            self._failure = SendFailed(self._transfer_id, event.code, event.message)
            for member in sorted(self._open):
                self._cancel(member, event.code, event.message)
        if self._open:
            return None
        if self._failure is not None:
            return self._failure
        return SendDone(
            self._transfer_id,
            num_bytes=self._num_bytes, hidden_s=self._hidden_s, exposed_s=self._exposed_s,
        )  # fmt: skip
