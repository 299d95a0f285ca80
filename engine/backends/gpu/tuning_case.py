"""One entry of a card's table to be found by measuring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.backends.gpu.tuning import Condition, LaunchConfig


@dataclass(slots=True, frozen=True, kw_only=True)
class TuningCase:
    """A launch, and the configurations to try for it.

    A kernel's file may have ``tuning_cases(device)``, which yields them one by one, so that each
    one's tensors are gone before the next.
    """

    kernel: str
    """The table's key."""
    whens: tuple[dict[str, Condition], ...]
    """Conditions of the entries that get the fastest configuration."""
    candidates: list[LaunchConfig]
    """What doesn't fit the card is left out when it fails to launch."""
    launch: Callable[[LaunchConfig], object]
    """Runs the kernel once, on the current stream."""
