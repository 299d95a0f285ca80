"""Last words on transfers that are over: a late Grant or Cancel gets an answer, not silence."""

from __future__ import annotations

from collections import OrderedDict

from mesh.messages import PrefillDone, TransferNack

MAX_TOMBSTONES = 4096


class ClosedTransfers:
    """Bounded; the oldest goes first. A forgotten transfer is answered as unknown."""

    def __init__(self, capacity: int = MAX_TOMBSTONES) -> None:
        self._capacity = capacity
        self._final_replies: OrderedDict[str, TransferNack | PrefillDone] = OrderedDict()

    def add(self, transfer_id: str, last_word: TransferNack | PrefillDone) -> None:
        """Remember the final message of a transfer."""
        self._final_replies[transfer_id] = last_word
        self._final_replies.move_to_end(transfer_id)
        while len(self._final_replies) > self._capacity:
            self._final_replies.popitem(last=False)

    def get(self, transfer_id: str) -> TransferNack | PrefillDone | None:
        """The final message, if still remembered."""
        return self._final_replies.get(transfer_id)
