"""KV that moved lately, by pair of workers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

SLOT_S = 60.0
NUM_SLOTS = 5
MAX_PAIRS = 1024
"""In one slot; what comes on top is counted as one more, nameless pair."""

_OTHERS = ("", "")


@dataclass(slots=True)
class _Flow:
    transfers: int = 0
    num_bytes: int = 0
    hidden_s: float = 0.0
    exposed_s: float = 0.0
    wait_s: float = 0.0


class TransferFlows:
    """Sums over the last ``NUM_SLOTS`` slots, the open one included."""

    def __init__(self) -> None:
        self._slots: deque[tuple[int, dict[tuple[str, str], _Flow]]] = deque(maxlen=NUM_SLOTS)

    def add(
        self,
        now_s: float,
        pair: tuple[str, str],
        *,
        num_bytes: int,
        hidden_s: float,
        exposed_s: float,
        wait_s: float,
    ) -> None:
        """Count one transfer.

        Args:
            now_s: Monotonic.
            pair: The prefill and the decode worker.
            num_bytes: As written.
            hidden_s: Moving while the prompt was computed.
            exposed_s: Moving after it.
            wait_s: Computed, and not allowed to move.
        """
        index = int(now_s / SLOT_S)
        if not self._slots or self._slots[-1][0] < index:
            self._slots.append((index, {}))
        flows = self._slots[-1][1]
        if pair not in flows and len(flows) >= MAX_PAIRS:
            pair = _OTHERS
        _count(flows.setdefault(pair, _Flow()), 1, num_bytes, hidden_s, exposed_s, wait_s)

    def as_json(self, now_s: float) -> list[dict[str, Any]]:
        """One object a pair, the most bytes first."""
        oldest = int(now_s / SLOT_S) - NUM_SLOTS + 1
        sums: dict[tuple[str, str], _Flow] = {}
        for index, flows in self._slots:
            if index < oldest:
                continue
            for pair, flow in flows.items():
                _count(
                    sums.setdefault(pair, _Flow()), flow.transfers, flow.num_bytes, flow.hidden_s,
                    flow.exposed_s, flow.wait_s,
                )  # fmt: skip
        ordered = sorted(sums.items(), key=lambda item: (-item[1].num_bytes, item[0]))
        return [
            {
                "prefill": prefill,
                "decode": decode,
                "transfers": flow.transfers,
                "bytes": flow.num_bytes,
                "hidden_s": flow.hidden_s,
                "exposed_s": flow.exposed_s,
                "wait_s": flow.wait_s,
            }
            for (prefill, decode), flow in ordered[:MAX_PAIRS]
        ]


def _count(
    flow: _Flow, transfers: int, num_bytes: int, hidden_s: float, exposed_s: float, wait_s: float
) -> None:
    flow.transfers += transfers
    flow.num_bytes += num_bytes
    flow.hidden_s += hidden_s
    flow.exposed_s += exposed_s
    flow.wait_s += wait_s
