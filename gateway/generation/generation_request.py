"""What one sequence asks of the cluster."""

from __future__ import annotations

import msgspec

from mesh.messages import SamplingParams, SloClass


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The same for all its attempts."""

    request_id: str
    """Unique in the cluster: one per sequence, not per HTTP request."""
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline_s: float
    """In the event loop's time."""
    priority: int = 0
    cache_salt: str = ""
    slo_class: SloClass = "interactive"
