"""One hand-off between tensor-parallel workers: a transfer per pair of ranks that share heads.

Every rank of D opens a transfer with each rank of P that holds some of its heads
(``layout.sources_of_rank``), all into the same blocks. The group ends as a whole:

    OPEN ── every member committed ──▶ COMMITTED
      └── a member failed, or ``cancel`` ──▶ ENDING ── every member ended ──▶ RELEASED

Nothing may be reused before the last member has ended, also where others committed: a rank that
still writes does not know of their fate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, auto

from kvtransfer.events import BlocksReleased, Committed, ReceiveFailed, ReceiverEvent
from mesh.messages import PrefillDone
from mesh.transitions import TransitionTable


class GroupState(Enum):
    """See the drawing above."""

    OPEN = auto()
    ENDING = auto()
    COMMITTED = auto()
    RELEASED = auto()


class GroupTrigger(Enum):
    """What moves a group."""

    ALL_COMMITTED = auto()
    GIVE_UP = auto()
    ALL_ENDED = auto()


_S, _T = GroupState, GroupTrigger

GROUP_TRANSITIONS: TransitionTable[GroupState, GroupTrigger] = TransitionTable(
    {
        (_S.OPEN, _T.ALL_COMMITTED): _S.COMMITTED,
        (_S.OPEN, _T.GIVE_UP): _S.ENDING,
        (_S.ENDING, _T.ALL_ENDED): _S.RELEASED,
    }
)


class RankGroup:
    """Joins the members' events into those of one transfer. Owns nothing but the members' fate."""

    def __init__(
        self,
        transfer_id: str,
        block_ids: tuple[int, ...],
        members: Iterable[str],
        cancel: Callable[[str], None],
    ) -> None:
        """Start with all members open.

        Args:
            transfer_id: The whole hand-off's.
            block_ids: What the members write into.
            members: Transfer ids of the pairs of ranks; at least one.
            cancel: ``TransferReceiver.cancel`` of the member's rank.
        """
        self.state = GroupState.OPEN
        self._transfer_id = transfer_id
        self._block_ids = block_ids
        self._open = set(members)
        self._cancel = cancel
        self._done: PrefillDone | None = None
        self._last: Committed | None = None
        self._num_bytes = 0
        if not self._open:
            raise ValueError("a group without members")

    def cancel(self) -> None:
        """Give the hand-off up; BlocksReleased follows, no ReceiveFailed. Idempotent."""
        if self.state is GroupState.OPEN:
            self._give_up()

    def on_event(self, event: ReceiverEvent) -> list[ReceiverEvent]:
        """What a member's event means for the hand-off; of other transfers nothing."""
        if event.transfer_id not in self._open:
            return []
        if isinstance(event, ReceiveFailed):
            if self.state is not GroupState.OPEN:
                return []
            self._give_up()
            return [ReceiveFailed(self._transfer_id, event.code, event.message)]
        self._open.discard(event.transfer_id)
        events: list[ReceiverEvent] = []
        if isinstance(event, Committed):
            disagrees = self._disagrees(event.done)
            self._done = self._done or event.done
            self._last = event
            self._num_bytes += event.done.num_bytes
            if disagrees and self.state is GroupState.OPEN:
                self._give_up()
                text = "the sender's ranks sampled different tokens"
                events.append(ReceiveFailed(self._transfer_id, "ranks_disagree", text))
        elif self.state is GroupState.OPEN:
            self._give_up()  # released without a failure: it was cancelled behind our back
            events.append(ReceiveFailed(self._transfer_id, "cancelled", "a rank gave up"))
        if not self._open:
            events.append(self._end())
        return events

    def _end(self) -> ReceiverEvent:
        if self.state is GroupState.OPEN:
            self.state = GROUP_TRANSITIONS.next(self.state, GroupTrigger.ALL_COMMITTED)
            assert self._done is not None
            assert self._last is not None
            done, last = self._done, self._last
            return Committed(
                self._transfer_id,
                PrefillDone(
                    transfer_id=self._transfer_id,
                    first_token_id=done.first_token_id,
                    finished=done.finished,
                    num_chunks=done.num_chunks,
                    wait_s=last.done.wait_s,
                    hidden_s=last.done.hidden_s,
                    exposed_s=last.done.exposed_s,
                    num_bytes=self._num_bytes,
                ),
                last.late_s,
            )
        self.state = GROUP_TRANSITIONS.next(self.state, GroupTrigger.ALL_ENDED)
        return BlocksReleased(self._transfer_id, self._block_ids)

    def _disagrees(self, done: PrefillDone) -> bool:
        first = self._done
        return first is not None and (first.first_token_id, first.finished) != (
            done.first_token_id,
            done.finished,
        )

    def _give_up(self) -> None:
        self.state = GROUP_TRANSITIONS.next(self.state, GroupTrigger.GIVE_UP)
        for member in sorted(self._open):
            self._cancel(member)
