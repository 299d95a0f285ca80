"""The last minutes of a gateway, cut into slots of equal length.

::

        oldest                                             now
    ────┬─────────┬─────────┬── … ──┬─────────┬─────────┬───┤
        │ closed  │ closed  │       │ closed  │ closed  │ open
    ────┴─────────┴─────────┴── … ──┴─────────┴─────────┴───┤

A series shows closed slots alone: the open one's rate would begin at 0 each time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from gateway.observe.quantile_sketch import QuantileSketch

NUM_SLOTS = 120
SUMMARY_SLOTS = 12
"""The summary is over this many, and the open one."""


class ClusterLoad(NamedTuple):
    """All workers' load at one moment."""

    prefill_running: int
    decode_running: int
    prefill_waiting: int
    decode_waiting: int
    """For KV too: many of these are on a prefill worker meanwhile."""
    queued_tokens: int
    kv_used: float
    """Occupancy of the decode workers' KV pools, 0 to 1."""

    def most(self, other: ClusterLoad) -> ClusterLoad:
        """Of each figure the larger one."""
        return ClusterLoad(
            max(self.prefill_running, other.prefill_running),
            max(self.decode_running, other.decode_running),
            max(self.prefill_waiting, other.prefill_waiting),
            max(self.decode_waiting, other.decode_waiting),
            max(self.queued_tokens, other.queued_tokens),
            max(self.kv_used, other.kv_used),
        )


@dataclass(eq=False)
class _Slot:
    index: int
    ttft: QuantileSketch = field(default_factory=QuantileSketch)
    tpot: QuantileSketch = field(default_factory=QuantileSketch)
    output_tokens: float = 0.0
    prompt_tokens: float = 0.0
    num_finished: int = 0
    num_failed: int = 0
    load: ClusterLoad | None = None
    """The most of each figure that was seen in the slot; None: it was not looked at."""

    @cached_property
    def quantiles(self) -> tuple[float | None, ...]:
        """p50 and p95 of TTFT, then of TPOT; for a closed slot, which changes no more."""
        return (
            self.ttft.quantile(0.5),
            self.ttft.quantile(0.95),
            self.tpot.quantile(0.5),
            self.tpot.quantile(0.95),
        )


class TimeSlots:
    """Bounded by ``NUM_SLOTS`` slots, whatever happens in them."""

    def __init__(self, slot_s: float) -> None:
        """Args: ``slot_s``, length of a slot in seconds."""
        self._slot_s = slot_s
        self._slots: deque[_Slot] = deque(maxlen=NUM_SLOTS + 1)
        self._first_index: int | None = None

    def at(self, now_s: float) -> _Slot:
        """The open slot, made if it is new."""
        index = int(now_s / self._slot_s)
        if self._first_index is None:
            self._first_index = index
        if not self._slots or self._slots[-1].index < index:
            self._slots.append(_Slot(index))
        return self._slots[-1]

    def sample(
        self, now_s: float, load: ClusterLoad, output_tokens: float, prompt_tokens: float
    ) -> None:
        """Note the load, and the tokens since the last sample."""
        slot = self.at(now_s)
        slot.load = load if slot.load is None else slot.load.most(load)
        slot.output_tokens += output_tokens
        slot.prompt_tokens += prompt_tokens

    def series(self, now_s: float) -> dict[str, list[float | None]]:
        """Columns over the closed slots, oldest first; None where nothing was seen."""
        end = self.at(now_s).index
        known = {slot.index: slot for slot in self._slots}
        assert self._first_index is not None
        rows = []
        for index in range(max(end - NUM_SLOTS, self._first_index), end):
            slot = known.get(index)
            rows.append((None,) * len(_COLUMNS) if slot is None else self._row(slot))
        return {name: [row[at] for row in rows] for at, name in enumerate(_COLUMNS)}

    def summary(self, now_s: float) -> dict[str, Any]:
        """Percentiles and request counts over the last ``SUMMARY_SLOTS``, rates of the last one."""
        end = self.at(now_s).index
        recent = [slot for slot in self._slots if slot.index >= end - SUMMARY_SLOTS]
        shown: dict[str, Any] = {"window_s": SUMMARY_SLOTS * self._slot_s}
        for name in ("ttft", "tpot"):
            whole = QuantileSketch.merged(getattr(slot, name) for slot in recent)
            for percent in (50, 95, 99):
                shown[f"{name}_p{percent}_s"] = whole.quantile(percent / 100)
        shown["finished"] = sum(slot.num_finished for slot in recent)
        shown["failed"] = sum(slot.num_failed for slot in recent)
        last = next((slot for slot in recent if slot.index == end - 1), None)
        shown["output_tokens_per_s"] = last.output_tokens / self._slot_s if last else 0.0
        shown["prompt_tokens_per_s"] = last.prompt_tokens / self._slot_s if last else 0.0
        return shown

    def _row(self, slot: _Slot) -> tuple[float | None, ...]:
        return (
            *slot.quantiles,
            slot.output_tokens / self._slot_s,
            slot.prompt_tokens / self._slot_s,
            slot.num_finished,
            slot.num_failed,
            *(slot.load or _NO_LOAD),
        )


_NO_LOAD = (None,) * len(ClusterLoad._fields)
_COLUMNS = (
    "ttft_p50_s", "ttft_p95_s", "tpot_p50_s", "tpot_p95_s", "output_tokens_per_s",
    "prompt_tokens_per_s", "finished", "failed", *ClusterLoad._fields,
)  # fmt: skip
