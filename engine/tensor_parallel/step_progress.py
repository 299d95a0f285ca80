"""How far a follower's model thread has come; written by it, read by its event loop."""

from __future__ import annotations

from collections.abc import Callable


class StepProgress:
    """Steps are numbered from 1 as rank 0 broadcasts them (``Engine.num_forwards``)."""

    def __init__(self) -> None:
        self.on_change: Callable[[], None] | None = None
        """Called on the model thread."""
        self._num_done = 0
        self._current = 0
        self._num_groups = 0

    def begin(self) -> None:
        """The next step starts; the one before it may not have ended."""
        self._num_groups = 0  # before it counts for the new step
        self._current += 1

    def group_done(self, group: int) -> None:
        """A group of layers has written its KV."""
        self._num_groups = group + 1
        self._changed()

    def end(self) -> None:
        """The oldest step's KV is all in memory."""
        self._num_done += 1
        self._changed()

    def has_reached(self, step: int, part: int | None) -> bool:
        """Whether the KV of a step, or of one group of its layers, is in memory."""
        if self._num_done >= step:
            return True
        return part is not None and self._current == step and self._num_groups > part

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()
