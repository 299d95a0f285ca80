"""Names, lifetimes and wire forms of what the registry keeps in Redis.

pdmesh:workers         set of worker ids; only an index, an id without its key is dead
pdmesh:worker:{id}     MessagePack of WorkerInfo; expires 3 s after the last heartbeat
pdmesh:load:{id}       MessagePack of LoadUpdate; the same
channel pdmesh:load    LoadUpdate, about ten times a second from every worker
channel pdmesh:member  MemberChange, when a worker comes or leaves in good order
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from mesh.errors import MessageTooLarge, ProtocolError
from mesh.worker_info import LoadSnapshot, WorkerInfo

_Value = TypeVar("_Value", WorkerInfo, "LoadUpdate", "MemberChange")

WORKERS_KEY = "pdmesh:workers"
LOAD_CHANNEL = "pdmesh:load"
MEMBER_CHANNEL = "pdmesh:member"

HEARTBEAT_S = 1.0
HEARTBEAT_TTL_S = 3.0
LOAD_INTERVAL_S = 0.1

MAX_WORKERS = 4096
MAX_VALUE_BYTES = 64 << 10
"""Cap on any value or published message that is decoded."""


class LoadUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's load; ``epoch`` keeps a dead start's last words off its successor."""

    worker_id: str
    epoch: int
    load: LoadSnapshot


class MemberChange(msgspec.Struct, frozen=True, kw_only=True):
    """A worker registered, or left in good order."""

    worker_id: str
    epoch: int
    joined: bool


def worker_key(worker_id: str) -> str:
    """Key of one worker's WorkerInfo."""
    return f"pdmesh:worker:{worker_id}"


def load_key(worker_id: str) -> str:
    """Key of one worker's LoadUpdate."""
    return f"pdmesh:load:{worker_id}"


_encoder = msgspec.msgpack.Encoder()


def encode_value(value: WorkerInfo | LoadUpdate | MemberChange) -> bytes:
    """Encode a value for Redis."""
    return _encoder.encode(value)


def decode_value(data: bytes | str, kind: type[_Value]) -> _Value:
    """Decode and validate a value of the given type.

    Raises:
        MessageTooLarge: over ``MAX_VALUE_BYTES``.
        ProtocolError: not a well-formed value of that type.
    """
    if isinstance(data, str):
        raise ProtocolError("registry value is text")
    if len(data) > MAX_VALUE_BYTES:
        raise MessageTooLarge(f"registry value of {len(data)} bytes is over the cap")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"not a valid {kind.__name__}: {error}") from error
