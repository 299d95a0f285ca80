"""Grants that came before their PrefillRequest: bounded in number and in time."""

from __future__ import annotations

from collections import OrderedDict

from mesh.messages import Grant

MAX_HELD = 1024


class HeldGrants:
    """In order of arrival, which is the order of expiry."""

    def __init__(self, hold_s: float, capacity: int = MAX_HELD) -> None:
        self._hold_s = hold_s
        self._capacity = capacity
        self._held: OrderedDict[str, tuple[float, str, Grant]] = OrderedDict()

    def add(self, receiver_id: str, grant: Grant, now_s: float) -> bool:
        """Hold a grant; False when full or when this id is held already."""
        if len(self._held) >= self._capacity or grant.transfer_id in self._held:
            return False
        self._held[grant.transfer_id] = (now_s + self._hold_s, receiver_id, grant)
        return True

    def take(self, transfer_id: str) -> tuple[str, Grant] | None:
        """Remove and return (receiver id, grant)."""
        entry = self._held.pop(transfer_id, None)
        return None if entry is None else entry[1:]

    def take_expired(self, now_s: float) -> list[tuple[str, Grant]]:
        """Remove and return those nobody asked for in time."""
        expired = []
        while self._held:
            deadline_s, receiver_id, grant = next(iter(self._held.values()))
            if deadline_s > now_s:
                break
            del self._held[grant.transfer_id]
            expired.append((receiver_id, grant))
        return expired

    def take_other_addresses(self, receiver_id: str, address: bytes) -> list[str]:
        """Remove a receiver's grants for an endpoint it has replaced since; their transfer ids."""
        stale = [
            transfer_id
            for transfer_id, (_, holder, grant) in self._held.items()
            if holder == receiver_id and grant.address != address
        ]
        for transfer_id in stale:
            del self._held[transfer_id]
        return stale

    def drop_receiver(self, receiver_id: str) -> None:
        """Forget a dead receiver's grants."""
        for transfer_id in [t for t, (_, r, _) in self._held.items() if r == receiver_id]:
            del self._held[transfer_id]

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._held

    def __len__(self) -> int:
        return len(self._held)
