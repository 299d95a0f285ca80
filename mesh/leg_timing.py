"""What a worker tells of the time that a leg took; rides on the leg's first output."""

from __future__ import annotations

import msgspec


class LegTiming(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a leg did until its first output: durations by its worker's own clock, in seconds.

    ``docs/observability.md`` draws how the gateway lays them on its own time.
    """

    queue_s: float
    """Ready to be computed (received; on D: its KV committed) until a step took it up."""
    compute_s: float
    """From there to its first output: all chunks of a prompt, or one decode step."""
    kv_wait_s: float = 0.0
    """D, as P told it: the prompt was computed, and its KV could not be moved yet."""
    kv_hidden_s: float = 0.0
    """D, as P told it: KV moved while the prompt was still being computed."""
    kv_exposed_s: float = 0.0
    """D: KV moved or was verified after the prompt was computed."""
    kv_bytes: int = 0
    """D, as P told it: KV that was written for this leg."""
