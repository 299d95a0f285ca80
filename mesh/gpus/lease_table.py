"""Who computes on which GPU of a host, as Redis has it.

pdmesh:gpu:{HOST}:UUID:SLOT    "SLOTS EPOCH WORKER_ID"; expires when its holder falls silent

A GPU is shared by workers that all allow the same number of slots, one key each; a worker that
shares with nobody allows one. One script takes, keeps and takes again: all GPUs it is asked for, or
none. The host's id stands in braces so that a Redis cluster keeps a host's keys together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import Redis

from mesh.config import MAX_GPU_SLOTS

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MAX_VALUE_BYTES = 256

# KEYS: all slots of each GPU. ARGV: our value, its life in ms, slots of a GPU, ours, epoch and id.
# Answers the keys taken, or '' and the value that is in the way. A key with our id is ours,
# whatever earlier start wrote it.
_TAKE = """
local value, life, width, slots, epoch, id = unpack(ARGV)
width = tonumber(width)
local taken = {}
for first = 1, #KEYS, width do
  local ours, free, sharer
  for i = first, first + width - 1 do
    local usable = i - first < tonumber(slots)
    local held = redis.call('GET', KEYS[i])
    if not held then
      if usable and not free then free = i end
    else
      local its_slots, its_epoch, its_id = string.match(held, '^(%d+) (%d+) (.+)$')
      if its_id == id then
        if its_epoch > epoch then return {'', held} end
        if usable then ours = i end
      elseif its_slots ~= slots then
        return {'', held}
      else
        sharer = held
      end
    end
  end
  local place = ours or free
  if not place then return {'', sharer} end
  taken[#taken + 1] = KEYS[place]
end
for _, key in ipairs(taken) do redis.call('SET', key, value, 'PX', life) end
return taken
"""

_RELEASE = """
for _, key in ipairs(KEYS) do
  if redis.call('GET', key) == ARGV[1] then redis.call('DEL', key) end
end
"""


def host_id() -> str:
    """Equal for all processes and containers under one kernel, another after each boot."""
    return _BOOT_ID.read_text().strip()


@dataclass(frozen=True, slots=True)
class Holder:
    """One start of a worker that leases a GPU."""

    worker_id: str
    epoch: int
    """Larger at each start."""
    slots: int
    """How many workers it lets the GPU be shared by."""

    @property
    def value(self) -> str:
        """As it stands in Redis; epochs have one length, so that text compares as they do."""
        return f"{self.slots} {self.epoch:020d} {self.worker_id}"


class GpuLeaseTable:
    """The leases of one host, for one holder. Every call is one round trip and may block for the
    client's time-out; what Redis raises comes through (``REDIS_ERRORS``)."""

    def __init__(self, redis: Redis, host: str, holder: Holder, life_ms: int) -> None:
        """Prepare; nothing is sent.

        Args:
            redis: a client with ``decode_responses=False``; stays the caller's.
            host: ``host_id()``.
            holder: in whose name.
            life_ms: how long a lease lives without being taken again.
        """
        self._redis = redis
        self._host = host
        self.holder = holder
        """In whose name."""
        self._life_ms = life_ms
        self._take = redis.register_script(_TAKE)
        self._release = redis.register_script(_RELEASE)

    def holders(self, uuids: Sequence[str]) -> dict[str, list[Holder]]:
        """Who leases each GPU now, the caller's own earlier starts left out."""
        keys = [key for uuid in uuids for key in self._keys(uuid)]
        values: Any = self._redis.mget(keys) if keys else []
        found: dict[str, list[Holder]] = {uuid: [] for uuid in uuids}
        for i, value in enumerate(values):
            holder = None if value is None else _parse(value)
            if holder is not None and holder.worker_id != self.holder.worker_id:
                found[uuids[i // MAX_GPU_SLOTS]].append(holder)
        return found

    def num_holders(self, held: Mapping[str, Sequence[Holder]]) -> dict[str, int]:
        """Of the GPUs that the holder may take: how many workers are on each already."""
        slots = self.holder.slots
        return {
            uuid: len(there)
            for uuid, there in held.items()
            if len(there) < slots and all(other.slots == slots for other in there)
        }

    def take(self, uuids: Sequence[str]) -> Holder | None:
        """Lease all of these for another life, whether or not they are leased already.

        Returns:
            None; or who holds one of them, in which case nothing has changed.
        """
        holder = self.holder
        arguments: list[str | int] = [holder.value, self._life_ms, MAX_GPU_SLOTS, holder.slots,
                     f"{holder.epoch:020d}", holder.worker_id]  # fmt: skip
        keys = [key for uuid in uuids for key in self._keys(uuid)]
        answer: Any = self._take(keys=keys, args=arguments)
        if not answer or answer[0] != b"":
            return None
        return _parse(answer[1])

    def release(self, uuids: Sequence[str]) -> None:
        """End the holder's leases of these GPUs, nobody else's."""
        keys = [key for uuid in uuids for key in self._keys(uuid)]
        if keys:
            self._release(keys=keys, args=[self.holder.value])

    def _keys(self, uuid: str) -> list[str]:
        return [f"pdmesh:gpu:{{{self._host}}}:{uuid}:{slot}" for slot in range(MAX_GPU_SLOTS)]


def _parse(value: bytes) -> Holder:
    """A holder from Redis; a malformed value is an unknown one that shares with nobody."""
    slots, _, rest = value[:_MAX_VALUE_BYTES].decode(errors="replace").partition(" ")
    epoch, _, worker_id = rest.partition(" ")
    if not (slots.isdecimal() and epoch.isdecimal() and worker_id):
        return Holder("unknown", 0, 0)
    return Holder(worker_id, int(epoch), int(slots))
