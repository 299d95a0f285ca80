"""Which receivers' links are behind: computed KV that was granted and waits to be written."""

from __future__ import annotations

from collections.abc import Iterable

from kvtransfer.sender.state import Outgoing, SendState

MAX_BACKLOG_BYTES = 128 << 20
"""Per receiver; beyond it no prompts are begun for this receiver."""


class Backlog:
    """A receiver is congested from ``MAX_BACKLOG_BYTES`` on, until half of that is left."""

    def __init__(self) -> None:
        self._congested: frozenset[str] = frozenset()

    def congested(self, transfers: Iterable[Outgoing]) -> frozenset[str]:
        """Receivers that are, given all open transfers."""
        waiting: dict[str, int] = {}
        for outgoing in transfers:
            plan = outgoing.plan
            if outgoing.state is SendState.WRITING and plan is not None:
                part_bytes = len(plan.local) * plan.stride // plan.num_parts
                num_bytes = len(outgoing.pending) * part_bytes
                waiting[outgoing.receiver_id] = waiting.get(outgoing.receiver_id, 0) + num_bytes
        self._congested = frozenset(
            receiver_id
            for receiver_id, num_bytes in waiting.items()
            if num_bytes > MAX_BACKLOG_BYTES // (2 if receiver_id in self._congested else 1)
        )
        return self._congested
