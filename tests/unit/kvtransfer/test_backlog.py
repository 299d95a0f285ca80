"""A receiver is congested from the limit on, until half of that is left."""

from __future__ import annotations

from kvtransfer.lease import Lease
from kvtransfer.memory.layout import BlockLayout, plan_write
from kvtransfer.sender.backlog import MAX_BACKLOG_BYTES, Backlog
from kvtransfer.sender.state import Outgoing, SendState

BLOCK_BYTES = MAX_BACKLOG_BYTES // 8
LAYOUT = BlockLayout.opaque(BLOCK_BYTES)


def outgoing(receiver_id: str, num_blocks: int, state: SendState = SendState.WRITING) -> Outgoing:
    transfer = Outgoing("t", receiver_id, Lease.start(1, 0), state)
    transfer.plan = plan_write(LAYOUT, LAYOUT, LAYOUT.heads, 1)
    transfer.submit(0, range(num_blocks), [0], lambda block, part: None)
    return transfer


def test_hysteresis() -> None:
    backlog = Backlog()
    assert backlog.congested([outgoing("d", 5), outgoing("d", 3)]) == frozenset()
    assert backlog.congested([outgoing("d", 5), outgoing("d", 4)]) == {"d"}
    assert backlog.congested([outgoing("d", 5), outgoing("e", 5)]) == {"d"}
    assert backlog.congested([outgoing("d", 4)]) == frozenset()
    assert backlog.congested([outgoing("d", 5)]) == frozenset()


def test_what_nobody_has_room_for_yet_does_not_count() -> None:
    backlog = Backlog()
    waiting = outgoing("d", 20, SendState.EXPECTED)
    assert backlog.congested([waiting, outgoing("d", 20, SendState.DRAINING)]) == frozenset()
