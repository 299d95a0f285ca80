"""The transition tables: complete, without dead ends, and strict."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest

from kvtransfer.ranks.receive_group import GROUP_TRANSITIONS, GroupState, GroupTrigger
from kvtransfer.receiver.state import RECEIVE_TRANSITIONS, ReceiveState, ReceiveTrigger
from kvtransfer.sender.state import SEND_TRANSITIONS, SendState, SendTrigger
from mesh.errors import IllegalTransition

TABLES = [
    (RECEIVE_TRANSITIONS, ReceiveState, ReceiveTrigger, {"COMMITTED", "RELEASED"}, "OPENING"),
    (GROUP_TRANSITIONS, GroupState, GroupTrigger, {"COMMITTED", "RELEASED"}, "OPEN"),
    (SEND_TRANSITIONS, SendState, SendTrigger, {"CLOSED"}, "EXPECTED"),
]


@pytest.mark.parametrize(("table", "states", "triggers", "ends", "start"), TABLES)
def test_table(
    table: Any, states: type[Enum], triggers: type[Enum], ends: set[str], start: str
) -> None:
    rows = table.rows()
    assert {trigger for _, trigger in rows} == set(triggers)
    assert {state.name for state in states} - {state.name for state, _ in rows} == ends
    reached = {states[start]}
    for _ in states:
        reached |= {target for (source, _), target in rows.items() if source in reached}
    assert reached == set(states)
    for state in states:
        for trigger in triggers:
            if table.allows(state, trigger):
                assert table.next(state, trigger) is rows[state, trigger]
            else:
                with pytest.raises(IllegalTransition, match=trigger.name):
                    table.next(state, trigger)
