"""Steps that a device computes while the host goes on, and the blocks that they still write into.

Kernels run in the order of their launch, so blocks of an ended sequence could go to another one of
this worker at once. A remote writer does not follow that order: blocks become free only when the
last launched step that holds them is done.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from engine.cache.block_pool import BlockPool
from engine.scheduling.step_plan import StepPlan
from engine.sequence import Sequence


@dataclass(slots=True)
class _HeldStep:
    plan: StepPlan
    sequences: set[Sequence]
    retired: list[int] = field(default_factory=list)


class LaunchedSteps:
    """In the order of their launch; the engine keeps at most two."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._steps: collections.deque[_HeldStep] = collections.deque()

    @property
    def num_steps(self) -> int:
        """Launched and not done."""
        return len(self._steps)

    @property
    def retired(self) -> list[int]:
        """Blocks given up that a step still writes into; one reference each."""
        return [block for step in self._steps for block in step.retired]

    def add(self, plan: StepPlan) -> None:
        """The plan was launched."""
        self._steps.append(_HeldStep(plan, {chunk.sequence for chunk in plan.chunks}))

    def done(self, plan: StepPlan) -> None:
        """The oldest plan is computed."""
        step = self._steps.popleft()
        assert step.plan is plan, "steps end in the order of their launch"
        self._pool.free(step.retired)

    def free(self, sequence: Sequence, blocks: SequenceOf[int]) -> None:
        """Free a sequence's blocks (in this order), now or when nothing computes it any more."""
        for step in reversed(self._steps):
            if sequence in step.sequences:
                step.retired += blocks
                return
        self._pool.free(blocks)
