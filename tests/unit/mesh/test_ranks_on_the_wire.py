"""How many ranks a worker has is an optional, bounded field: older processes leave it out."""

from __future__ import annotations

import msgpack
import msgspec
import pytest

from mesh.messages import PeerRef
from mesh.worker_info import MAX_RANKS


def decode(fields: list[object]) -> PeerRef:
    return msgspec.msgpack.decode(msgpack.packb(fields), type=PeerRef)


def test_an_older_peer_has_one_rank() -> None:
    assert decode(["w", 7, "tcp://h:1"]).tensor_parallel == 1
    ours = PeerRef(worker_id="w", epoch=7, endpoint="tcp://h:1", tensor_parallel=4)
    assert msgpack.unpackb(msgspec.msgpack.encode(ours)) == ["w", 7, "tcp://h:1", 4]


@pytest.mark.parametrize("ranks", [0, -1, MAX_RANKS + 1, "2"])
def test_numbers_out_of_range_are_refused(ranks: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(["w", 7, "tcp://h:1", ranks])
