"""A lease: how long one side waits for a sign of life of the other, on an injected clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mesh.messages import LeaseRenew, TransferMessage
from mesh.telemetry import metrics

Clock = Callable[[], float]

DEFAULT_LEASE_S = 10.0
MIN_LEASE_S = 0.05
MAX_LEASE_S = 600.0
RENEWALS_PER_LEASE = 3
"""A lease survives two lost renewals."""


_RENEWALS = metrics.counter("pdmesh:lease_renewals", "Transfers whose lease was renewed from here.")


@dataclass(slots=True)
class Lease:
    """Expires at ``deadline_s`` unless renewed."""

    duration_s: float
    deadline_s: float

    @classmethod
    def start(cls, duration_s: float, now_s: float) -> Lease:
        """A lease that runs from now. Durations from a peer are clamped to sane ones."""
        duration_s = min(max(duration_s, MIN_LEASE_S), MAX_LEASE_S)
        return cls(duration_s, now_s + duration_s)

    def renew(self, now_s: float) -> None:
        """Start over. Also after the deadline, while its owner has not acted on it: our own loop
        may have stalled, not the peer."""
        self.deadline_s = now_s + self.duration_s

    def is_expired(self, now_s: float) -> bool:
        """Whether the time is up."""
        return now_s >= self.deadline_s


class RenewalTimer:
    """Says when the next renewal is due."""

    def __init__(self, lease_s: float) -> None:
        self._interval_s = lease_s / RENEWALS_PER_LEASE
        self._next_s = 0.0

    def is_due(self, now_s: float) -> bool:
        """True at most once per interval."""
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._interval_s
        return True


def send_renewals(
    send: Callable[[str, TransferMessage], bool], granted: Iterable[tuple[str, str]]
) -> None:
    """Tell every peer which transfers, given as (peer id, transfer id), are still worked on."""
    by_peer: dict[str, list[str]] = {}
    for peer_id, transfer_id in granted:
        by_peer.setdefault(peer_id, []).append(transfer_id)
    for peer_id, transfer_ids in by_peer.items():
        if send(peer_id, LeaseRenew(transfer_ids=tuple(transfer_ids))):
            _RENEWALS.inc(len(transfer_ids))
