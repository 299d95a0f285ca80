"""A state machine's only source of truth: one table of (state, event) → state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Generic, TypeVar

from mesh.errors import IllegalTransition

StateT = TypeVar("StateT", bound=Enum)
EventT = TypeVar("EventT", bound=Enum)


class TransitionTable(Generic[StateT, EventT]):
    """Immutable table; states without an outgoing row are terminal."""

    def __init__(self, rows: Mapping[tuple[StateT, EventT], StateT]) -> None:
        self._rows = dict(rows)

    def allows(self, state: StateT, event: EventT) -> bool:
        """Whether ``event`` has a row in ``state``."""
        return (state, event) in self._rows

    def next(self, state: StateT, event: EventT) -> StateT:
        """The state after ``event``.

        Raises:
            IllegalTransition: the table has no such row.
        """
        try:
            return self._rows[state, event]
        except KeyError:
            raise IllegalTransition(f"{event.name} is not allowed in {state.name}") from None

    def rows(self) -> Mapping[tuple[StateT, EventT], StateT]:
        """The rows, for tests and documentation."""
        return dict(self._rows)


def between_states(edges: Mapping[StateT, Iterable[StateT]]) -> TransitionTable[StateT, StateT]:
    """The table of a machine whose events are named after the states that they lead to."""
    return TransitionTable({(x, y): y for x, targets in edges.items() for y in targets})
