"""Life of one outgoing transfer on the prefill worker.

EXPECTED ──Grant──▶ WRITING ──finished, every granted block written──▶ AWAIT_ACK
   │  │               │ │                                                │  │
   │  │ answer ended  │ │ fail: cancel, lease, peer                      │  │ ack or lease end
   │  │ at token 1    │ ▼                                                │  ▼
   │  └───────────────┼──────────────────────────────────────────────────┼▶ CLOSED
   │ fail             ▼                                                  │    ▲
   └────────────▶ DRAINING ◀──────────────cancel by D────────────────────┘    │
                      └──no write in flight: TransferNack, the final word─────┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kvtransfer.lease import Lease
from kvtransfer.memory.layout import WritePlan
from kvtransfer.sender.transfer_time import TransferTime
from kvtransfer.transports.base import Write
from mesh.messages import Grant, PrefillDone
from mesh.transitions import TransitionTable


class SendState(Enum):
    """See the drawing above."""

    EXPECTED = auto()
    WRITING = auto()
    AWAIT_ACK = auto()
    DRAINING = auto()
    CLOSED = auto()


class SendTrigger(Enum):
    """What moves an outgoing transfer."""

    GRANT = auto()
    ALL_WRITTEN = auto()
    NOTHING_TO_SEND = auto()
    ACK = auto()
    LEASE_END = auto()
    FAIL = auto()
    DRAINED = auto()


_S, _T = SendState, SendTrigger

SEND_TRANSITIONS: TransitionTable[SendState, SendTrigger] = TransitionTable(
    {
        (_S.EXPECTED, _T.GRANT): _S.WRITING,
        (_S.EXPECTED, _T.NOTHING_TO_SEND): _S.CLOSED,
        (_S.EXPECTED, _T.FAIL): _S.DRAINING,
        (_S.WRITING, _T.ALL_WRITTEN): _S.AWAIT_ACK,
        (_S.WRITING, _T.NOTHING_TO_SEND): _S.CLOSED,
        (_S.WRITING, _T.FAIL): _S.DRAINING,
        (_S.AWAIT_ACK, _T.ACK): _S.CLOSED,
        (_S.AWAIT_ACK, _T.LEASE_END): _S.CLOSED,
        (_S.AWAIT_ACK, _T.FAIL): _S.DRAINING,
        (_S.DRAINING, _T.DRAINED): _S.CLOSED,
    }
)


@dataclass(slots=True)
class InFlight:
    """One chunk on its way."""

    write: Write
    num_bytes: int
    staged: tuple[int, ...] = ()
    """Staging blocks it reads from."""


@dataclass(frozen=True, slots=True)
class Pending:
    """One part of one computed block."""

    part: int
    index: int
    """Logical."""
    block_id: int
    """In the sender's pool."""
    digest: int | None
    """xxh3-64 of the part as it lies there; None where it was not computed yet."""


@dataclass(slots=True)
class Outgoing:
    """One transfer that P was asked to make."""

    transfer_id: str
    receiver_id: str
    lease: Lease
    """EXPECTED: time for a Grant. WRITING, AWAIT_ACK: D's sign of life. DRAINING: patience."""
    state: SendState = SendState.EXPECTED
    grant: Grant | None = None
    plan: WritePlan | None = None
    """Set with the grant."""
    pending: deque[Pending] = field(default_factory=deque)
    """Computed and not yet written."""
    submitted: set[tuple[int, int]] = field(default_factory=set)
    """(logical index, part) ever submitted."""
    num_written: int = 0
    """Parts of granted blocks whose write was started."""
    num_bytes: int = 0
    """Of them, as written."""
    time: TransferTime = field(default_factory=TransferTime)
    next_seq: int = 0
    in_flight: list[InFlight] = field(default_factory=list)
    done: PrefillDone | None = None
    """Set by ``finish``; ``num_chunks`` is filled in when it is sent."""
    is_announced: bool = False
    """``done`` was sent."""
    is_acked: bool = False
    """D has committed it."""
    failure: tuple[str, str] | None = None
    """Code and message, set on the way into DRAINING."""

    def move(self, trigger: SendTrigger) -> None:
        """Take one transition; raises IllegalTransition."""
        self.state = SEND_TRANSITIONS.next(self.state, trigger)

    def submit(
        self,
        first_index: int,
        block_ids: Sequence[int],
        parts: Sequence[int],
        digest: Callable[[int, int], int | None],
    ) -> None:
        """Have these parts of the blocks written; ``digest`` is called with each block and part.

        Raises:
            ValueError: one was submitted before, or after ``finish``.
        """
        indices = range(first_index, first_index + len(block_ids))
        new = {(index, part) for index in indices for part in parts}
        if self.done is not None or first_index < 0 or not self.submitted.isdisjoint(new):
            raise ValueError(f"blocks {indices} were submitted before, or after finish")
        self.submitted |= new
        for part in parts:
            self.pending.extend(
                Pending(part, index, block, digest(block, part))
                for index, block in zip(indices, block_ids, strict=True)
            )

    def drop_below(self, first_index: int) -> None:
        """Forget pending blocks that the receiver has already."""
        if any(entry.index < first_index for entry in self.pending):
            self.pending = deque(entry for entry in self.pending if entry.index >= first_index)

    def covers(self, grant: Grant) -> bool:
        """Whether everything submitted lies below the end of the grant."""
        end = grant.first_index + len(grant.block_ids)
        return not self.submitted or max(self.submitted)[0] < end

    def has_written_all(self) -> bool:
        """Whether the write of every part of every granted block was started."""
        if self.grant is None or self.plan is None:
            return False
        return self.num_written == len(self.grant.block_ids) * self.plan.num_parts

    def take_run(self, most: int) -> list[Pending]:
        """The next pending blocks, at most ``most``: of one part, with consecutive indices."""
        run = [self.pending.popleft()]
        part, index = run[0].part, run[0].index
        while self.pending and len(run) < most:
            entry = self.pending[0]
            if (entry.part, entry.index) != (part, index + len(run)):
                break
            run.append(self.pending.popleft())
        return run
