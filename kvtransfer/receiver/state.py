"""Life of one incoming transfer on the decode worker.

    OPENING ──grant sent──▶ GRANTED ──all arrived + PrefillDone──▶ COMMITTED     blocks → caller
       │                       │ │
       │ abandon               │ └─P's final word (Nack, or a PrefillDone that can't be met)─┐
       ▼                       │ abandon (failure, lease, caller's cancel)                   │
    RELEASED ◀─────────────────┼──────────────────────────────────────────────────────────── ┤
       ▲                       ▼                                                             │
       │                   CANCELLING ──P's final word (TransferNack or PrefillDone)─────────┘
       │                       │ no answer within the lease, or P unreachable
       └──────settled────── FENCED (the agent P could still write through is destroyed)

Blocks are quarantined from GRANTED on and leave it by exactly one of COMMITTED and RELEASED.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from kvtransfer.lease import Lease
from mesh.kv_heads import Heads
from mesh.messages import PeerRef, PrefillDone
from mesh.transitions import TransitionTable


class ReceiveState(Enum):
    """See the drawing above."""

    OPENING = auto()
    GRANTED = auto()
    CANCELLING = auto()
    FENCED = auto()
    COMMITTED = auto()
    RELEASED = auto()


class ReceiveTrigger(Enum):
    """What moves an incoming transfer."""

    GRANT_SENT = auto()
    COMPLETE = auto()
    ABANDON = auto()
    FINAL_WORD = auto()
    FENCE = auto()
    SETTLE = auto()


_S, _T = ReceiveState, ReceiveTrigger

RECEIVE_TRANSITIONS: TransitionTable[ReceiveState, ReceiveTrigger] = TransitionTable(
    {
        (_S.OPENING, _T.GRANT_SENT): _S.GRANTED,
        (_S.OPENING, _T.ABANDON): _S.RELEASED,
        (_S.GRANTED, _T.COMPLETE): _S.COMMITTED,
        (_S.GRANTED, _T.ABANDON): _S.CANCELLING,
        (_S.GRANTED, _T.FINAL_WORD): _S.RELEASED,
        (_S.GRANTED, _T.FENCE): _S.FENCED,
        (_S.CANCELLING, _T.FINAL_WORD): _S.RELEASED,
        (_S.CANCELLING, _T.FENCE): _S.FENCED,
        (_S.FENCED, _T.SETTLE): _S.RELEASED,
    }
)


@dataclass(slots=True)
class Incoming:
    """One transfer that D granted or is about to."""

    transfer_id: str
    sender: PeerRef
    block_ids: tuple[int, ...]
    first_index: int
    lease: Lease
    """OPENING: time to deliver the grant. GRANTED: P's sign of life. CANCELLING: P's answer."""
    rank: int = 0
    """The sender's, in its tensor-parallel group."""
    heads: Heads | None = None
    """What this sender writes of each block; None: all of it."""
    encoding: str = ""
    state: ReceiveState = ReceiveState.OPENING
    num_parts: int = 0
    """How many parts the sender cuts each block into; 0 before its first chunk."""
    arrived: bytearray = field(default_factory=bytearray)
    """One flag per granted block and part."""
    num_arrived: int = 0
    chunk_seqs: set[int] = field(default_factory=set)
    announced: PrefillDone | None = None
    """P has written everything, if not all of it has arrived."""
    heard_done_s: float | None = None
    """When the first word of either kind came."""
    settle_at_s: float | None = None
    """FENCED: when the blocks may be reused; None while the fence is no proof."""

    def move(self, trigger: ReceiveTrigger) -> None:
        """Take one transition; raises IllegalTransition."""
        self.state = RECEIVE_TRANSITIONS.next(self.state, trigger)

    @property
    def is_quiet(self) -> bool:
        """P has no write in flight."""
        return self.announced is not None and self.announced.is_quiet

    @property
    def is_complete(self) -> bool:
        """Every granted block arrived, in exactly the chunks that P counted."""
        return (
            self.announced is not None
            and self.num_arrived == len(self.block_ids) * self.num_parts
            and (self.num_parts > 0 or not self.block_ids)
            and len(self.chunk_seqs) == self.announced.num_chunks
        )

    def has_parts(self, num_parts: int) -> bool:
        """Whether the sender cuts blocks into this many parts; its first chunk decides."""
        if self.num_parts == 0:
            self.num_parts = num_parts
            self.arrived = bytearray(len(self.block_ids) * num_parts)
        return self.num_parts == num_parts

    def has_any(self, start: int, stop: int, part: int) -> bool:
        """Whether this part of any of the blocks ``start`` to ``stop`` (exclusive) has arrived."""
        return any(
            self.arrived[start * self.num_parts + part : stop * self.num_parts : self.num_parts]
        )

    def mark_arrived(self, seq: int, start: int, num_blocks: int, part: int) -> None:
        """Count a verified chunk."""
        first, stop = start * self.num_parts + part, (start + num_blocks) * self.num_parts
        self.arrived[first : stop : self.num_parts] = b"\x01" * num_blocks
        self.num_arrived += num_blocks
        self.chunk_seqs.add(seq)
