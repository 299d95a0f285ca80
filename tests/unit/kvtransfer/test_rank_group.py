"""A hand-off of several ranks ends as one: all committed, or all ended and given back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.events import BlocksReleased, Committed, ReceiveFailed, ReceiverEvent
from kvtransfer.ranks.names import member_id
from kvtransfer.ranks.receive_group import GroupState, RankGroup
from mesh.messages import PrefillDone

BLOCKS = (3, 4)
FATES = st.lists(
    st.sampled_from(["commit", "commit", "commit", "commit other token", "fail", "released"]),
    min_size=1,
    max_size=6,
)


def done(member: str, token: int = 7) -> PrefillDone:
    return PrefillDone(
        transfer_id=member, first_token_id=token, finished=False, num_chunks=1, num_bytes=100
    )


def events_of(member: str, fate: str) -> list[ReceiverEvent]:
    match fate:
        case "fail":
            return [ReceiveFailed(member, "lease_expired", ""), BlocksReleased(member, BLOCKS)]
        case "released":
            return [BlocksReleased(member, BLOCKS)]
        case "commit":
            return [Committed(member, done(member))]
    return [Committed(member, done(member, 8))]


@given(fates=FATES, order=st.randoms(), cancel_after=st.integers(0, 12))
def test_any_order_of_endings(fates: list[str], order: object, cancel_after: int) -> None:
    members = [member_id("t", rank, 0) for rank in range(len(fates))]
    cancelled: list[str] = []
    group = RankGroup("t", BLOCKS, members, cancelled.append)
    queues = [events_of(member, fate) for member, fate in zip(members, fates, strict=True)]
    heard: list[ReceiverEvent] = []
    num_left = len(members)
    for turn in range(100):
        if turn == cancel_after:
            group.cancel()
        queue = order.choice(queues)  # type: ignore[attr-defined]
        if not queue:
            continue
        event = queue.pop(0)
        num_left -= not isinstance(event, ReceiveFailed)
        heard += group.on_event(event)
        ends = [e for e in heard if not isinstance(e, ReceiveFailed)]
        assert len(ends) == (num_left == 0), "it ends with its last member"
        heard += group.on_event(event) if isinstance(event, Committed) else []  # said twice
    for queue in queues:
        while queue:
            heard += group.on_event(queue.pop(0))
    failures = [event for event in heard if isinstance(event, ReceiveFailed)]
    assert len(failures) <= 1
    if isinstance(heard[-1], Committed):
        assert set(fates) in ({"commit"}, {"commit other token"})
        assert (heard, cancelled) == ([heard[-1]], [])
        assert heard[-1].transfer_id == "t"
        assert heard[-1].done.num_bytes == 100 * len(members)
        assert group.state is GroupState.COMMITTED
    else:
        assert heard[-1] == BlocksReleased("t", BLOCKS)
        assert group.state is GroupState.RELEASED
        assert set(cancelled) <= set(members)


def test_the_first_failure_cancels_the_others() -> None:
    cancelled: list[str] = []
    group = RankGroup("t", BLOCKS, ["a", "b", "c"], cancelled.append)
    assert group.on_event(Committed("a", done("a"))) == []
    assert group.on_event(ReceiveFailed("b", "peer_down", "gone")) == [
        ReceiveFailed("t", "peer_down", "gone")
    ]
    assert cancelled == ["b", "c"]
    assert group.on_event(BlocksReleased("b", BLOCKS)) == []
    assert group.on_event(Committed("c", done("c"))) == [BlocksReleased("t", BLOCKS)]


def test_a_group_without_members() -> None:
    with pytest.raises(ValueError, match="without members"):
        RankGroup("t", BLOCKS, [], lambda member: None)
