"""What rank 0 and a follower tell each other before the first step."""

from __future__ import annotations

import msgspec

from engine.device import DeviceKind
from mesh.config import WorkerConfig


class RankSetup(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="setup"):
    """Rank 0's first message: who you are and where the others are."""

    config: WorkerConfig
    """The worker's own."""
    device: DeviceKind
    """What it computes on: the CPU, or the GPU of its rank's number."""
    rank: int
    port: int
    """Of the group's store, on the loopback device."""
    epoch: int
    """This start of the worker."""


class RankReady(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="ready"):
    """The follower's first message: its part of the model is loaded."""

    fingerprint: str
    """It must have read the same model."""
