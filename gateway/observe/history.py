"""What a gateway remembers of its last minutes, for the dashboard and ``pdmesh top``.

Fed once or twice a request and once a second, never per token; bounded in every direction; holds
figures and ids, never text or tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway.observe.time_slots import ClusterLoad, TimeSlots
from gateway.observe.timeline import MAX_KV_BYTES
from gateway.observe.transfer_flows import NUM_SLOTS, SLOT_S, TransferFlows
from mesh.leg_timing import LegTiming
from mesh.messages import SloClass

MAX_REQUESTS = 64
_SLOT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One sequence that has ended."""

    request_id: str
    slo_class: SloClass
    outcome: str
    """How it finished, ``abort``, or an error's code."""
    num_prompt_tokens: int
    num_output_tokens: int
    timing: dict[str, Any]
    """As ``Timeline.as_json`` gives it."""
    ended_s: float
    """Monotonic."""

    @property
    def has_failed(self) -> bool:
        """Whether it ended with an error."""
        return self.outcome not in ("stop", "length", "tool_calls", "abort")


class History:
    """Owned by the server state; a few hundred kilobytes at most in use."""

    def __init__(
        self, *, slot_s: float = _SLOT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Empty; args: length of a slot of the series, and the clock."""
        self.slot_s = slot_s
        self._clock = clock
        self._started_s = clock()
        self._slots = TimeSlots(slot_s)
        self._slots.at(self._started_s)
        self._flows = TransferFlows()
        self._requests: deque[RequestRecord] = deque(maxlen=MAX_REQUESTS)
        self._token_counts: tuple[float, float] | None = None

    def on_first_token(self, ttft_s: float) -> None:
        """A request has its first token."""
        self._slots.at(self._clock()).ttft.add(ttft_s)

    def on_transfer(self, prefill_id: str, decode_id: str, timing: LegTiming) -> None:
        """A decode worker made its first token from KV of a prefill worker."""
        if timing.kv_bytes <= 0:
            return  # all of it was cached there
        self._flows.add(
            self._clock(),
            (prefill_id, decode_id),
            num_bytes=min(timing.kv_bytes, MAX_KV_BYTES),
            hidden_s=timing.kv_hidden_s,
            exposed_s=timing.kv_exposed_s,
            wait_s=timing.kv_wait_s,
        )

    def on_ended(self, record: RequestRecord) -> None:
        """A sequence is over."""
        self._requests.append(record)
        slot = self._slots.at(self._clock())
        if record.has_failed:
            slot.num_failed += 1
        elif record.outcome != "abort":
            slot.num_finished += 1
        if record.timing["tpot_s"] is not None:
            slot.tpot.add(record.timing["tpot_s"])

    def sample(self, load: ClusterLoad, output_tokens: float, prompt_tokens: float) -> None:
        """Note the load; tokens are counted since the process began."""
        before = self._token_counts or (output_tokens, prompt_tokens)
        self._token_counts = (output_tokens, prompt_tokens)
        self._slots.sample(
            self._clock(), load, output_tokens - before[0], prompt_tokens - before[1]
        )

    def as_json(self) -> dict[str, Any]:
        """All of it; ages instead of times, so that no two clocks need to agree."""
        now_s = self._clock()
        return {
            "uptime_s": now_s - self._started_s,
            "slot_s": self.slot_s,
            "summary": self._slots.summary(now_s),
            "series": self._slots.series(now_s),
            "flow_window_s": NUM_SLOTS * SLOT_S,
            "flows": self._flows.as_json(now_s),
            "requests": [_request(record, now_s) for record in reversed(self._requests)],
        }


def _request(record: RequestRecord, now_s: float) -> dict[str, Any]:
    return {
        "id": record.request_id,
        "age_s": now_s - record.ended_s,
        "slo_class": record.slo_class,
        "outcome": record.outcome,
        "failed": record.has_failed,
        "prompt_tokens": record.num_prompt_tokens,
        "output_tokens": record.num_output_tokens,
        **record.timing,
    }
