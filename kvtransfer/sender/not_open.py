"""What a sender says about transfers that are over, or whose request has not come yet."""

from __future__ import annotations

from kvtransfer.outbox import Outbox
from kvtransfer.sender.closed_transfers import ClosedTransfers
from kvtransfer.sender.held_grants import HeldGrants
from mesh.messages import Grant, PrefillDone, TransferNack


class NotOpen:
    """Remembers last words and early grants; every question about them gets its answer."""

    def __init__(self, outbox: Outbox, epoch: int, hold_s: float) -> None:
        """Borrow ``outbox``; ``epoch`` is the sender's, grants wait ``hold_s`` for a request."""
        self._epoch = epoch
        self._outbox = outbox
        self._held = HeldGrants(hold_s)
        self._tombstones = ClosedTransfers()

    def __len__(self) -> int:
        """Grants that wait for their request."""
        return len(self._held)

    def take_grant(self, transfer_id: str) -> tuple[str, Grant] | None:
        """The request came: (receiver id, grant) if that was here first."""
        return self._held.take(transfer_id)

    def refusal(self, transfer_id: str) -> TransferNack | None:
        """Why this transfer was refused before its request came, if it was."""
        word = self._tombstones.get(transfer_id)
        return word if isinstance(word, TransferNack) else None

    def add_last_word(self, transfer_id: str, word: PrefillDone | TransferNack) -> None:
        """A transfer has ended with it."""
        self._tombstones.add(transfer_id, word)

    def on_grant(
        self, receiver_id: str, grant: Grant, fault: tuple[str, str] | None, now_s: float
    ) -> None:
        """A grant for a transfer that is not open; ``fault`` says why it can't be served."""
        word = self._tombstones.get(grant.transfer_id)
        if word is not None:
            self._outbox.post(receiver_id, word)
        elif fault is not None:
            self._refuse(receiver_id, grant.transfer_id, *fault)
        elif not self._held.add(receiver_id, grant, now_s):
            self._refuse(receiver_id, grant.transfer_id, "unknown", "too many grants are waiting")

    def on_cancel(self, receiver_id: str, transfer_id: str) -> None:
        """Its receiver gave it up."""
        self._held.take(transfer_id)
        refusal = self.refusal(transfer_id)
        if refusal is not None:
            self._outbox.post(receiver_id, refusal)
        else:
            self._refuse(receiver_id, transfer_id, "cancelled", "cancelled by its receiver")

    def on_renewal(self, receiver_id: str, transfer_id: str) -> None:
        """Its receiver still waits: the last word got lost, or no grant ever came."""
        word = self._tombstones.get(transfer_id)
        if word is not None:
            self._outbox.post(receiver_id, word)
        elif transfer_id not in self._held:
            self._refuse(receiver_id, transfer_id, "unknown", "no grant of it came")

    def on_address(self, receiver_id: str, address: bytes) -> None:
        """A grant names this endpoint: those held for an older one would bring it back."""
        for transfer_id in self._held.take_other_addresses(receiver_id, address):
            self._refuse(receiver_id, transfer_id, "superseded", "the endpoint was replaced")

    def drop_receiver(self, receiver_id: str) -> None:
        """Forget a dead receiver's grants."""
        self._held.drop_receiver(receiver_id)

    def expire(self, now_s: float) -> None:
        """Refuse grants whose request did not come in time."""
        for receiver_id, grant in self._held.take_expired(now_s):
            self._refuse(receiver_id, grant.transfer_id, "unknown", "no prefill request came")

    def _refuse(self, receiver_id: str, transfer_id: str, code: str, message: str) -> None:
        """Once said, it stays refused."""
        nack = TransferNack(
            transfer_id=transfer_id, code=code, message=message, sender_epoch=self._epoch
        )
        self._outbox.post(receiver_id, nack)
        self._tombstones.add(transfer_id, nack)
