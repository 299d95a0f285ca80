"""A follower's steps: computed in the order they are broadcast, at most two launched.

    rank 0     launch 1 │ launch 2 │ collect 1 │ launch 3 │ collect 2 …
    follower   launch 1 │ launch 2 │ wait for 1 │ launch 3 │ wait for 2 …

Rank 0 broadcasts a step once the one before the last is done, so waiting for that one holds nothing
up. Where no step comes, the last step's end is looked for instead.
"""

from __future__ import annotations

import collections
from typing import NoReturn

from engine.engine import Engine
from engine.step_runner import ComputingStep
from engine.tensor_parallel.step_progress import StepProgress
from engine.tensor_parallel.step_wire import StepReceiver

_POLL_S = 0.001
"""How late the end of a step may be noticed."""
_REST_AFTER_S = 0.02
"""Without a step for this long, cores are given back."""
_MOST_LAUNCHED = 2


def follow_steps(
    engine: Engine, receiver: StepReceiver, progress: StepProgress, *, by_group: bool = False
) -> NoReturn:
    """Compute this rank's part of every step.

    Args:
        engine: The rank's.
        receiver: Where steps arrive.
        progress: Told of every step's end.
        by_group: Tell it of groups of layers, too; where launching is computing.

    Raises:
        EOFError: rank 0 is gone.
    """
    launched: collections.deque[ComputingStep] = collections.deque()
    on_group = progress.group_done if by_group else None
    timeout_s: float | None = None
    while True:
        step = receiver.next(_POLL_S if launched else timeout_s)
        if step is not None:
            progress.begin()
            launched.append(engine.follow(step.batch, step.graph_rows, on_group))
            timeout_s = _REST_AFTER_S
        elif not launched:
            engine.rest()
            timeout_s = None
        while launched and (len(launched) == _MOST_LAUNCHED or launched[0].is_done()):
            launched.popleft().finish()
            progress.end()
