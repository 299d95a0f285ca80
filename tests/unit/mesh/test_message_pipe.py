"""Messages through a socket pair: whole, in order, and the end of either side is heard."""

from __future__ import annotations

import os
import socket
import struct

import msgspec
import pytest

from tests.unit.mesh.until import until
from worker.followers import message_pipe
from worker.followers.message_pipe import MessagePipe


class Note(msgspec.Struct, frozen=True, array_like=True, tag="note"):
    """Anything."""

    number: int
    data: bytes = b""


DECODER = msgspec.msgpack.Decoder(Note)


class End:
    """One end and what it heard."""

    def __init__(self, end: socket.socket) -> None:
        self.heard: list[Note] = []
        self.closed: list[str] = []
        self.pipe = MessagePipe(end, DECODER, self.heard.append, self.closed.append)


async def test_large_and_small_messages_both_ways() -> None:
    left, right = map(End, socket.socketpair())
    notes = [Note(number, os.urandom(number * 300_000)) for number in range(6)]
    for note in notes:
        assert left.pipe.send(note)
        assert right.pipe.send(Note(-note.number))
    await until(lambda: len(right.heard) == len(left.heard) == 6)
    assert right.heard == notes
    assert [note.number for note in left.heard] == [0, -1, -2, -3, -4, -5]
    left.pipe.close()
    await until(lambda: right.closed)
    assert right.closed == ["the other end is gone"]
    assert left.closed == []
    assert not right.pipe.send(Note(1))
    assert not left.pipe.send(Note(1))


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", message_pipe.MAX_FRAME_BYTES + 1),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        struct.pack("<I", 8) + msgspec.msgpack.encode(["other", 1]),
    ],
)
async def test_nonsense_closes_it(data: bytes) -> None:
    raw, other = socket.socketpair()
    end = End(other)
    raw.send(data)
    await until(lambda: end.closed)
    assert end.heard == []
    assert raw.recv(1) == b""
    raw.close()


async def test_a_peer_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_pipe, "MAX_UNSENT_BYTES", 4 << 20)
    silent, other = socket.socketpair()
    end = End(other)
    note = Note(1, bytes(1 << 20))
    num_taken = 0
    while end.pipe.send(note):
        num_taken += 1
    assert 4 <= num_taken < 8
    assert end.closed == ["the other end takes nothing"]
    silent.close()


async def test_a_message_over_the_cap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_pipe, "MAX_FRAME_BYTES", 100)
    left, right = map(End, socket.socketpair())
    with pytest.raises(ValueError, match="over the cap"):
        left.pipe.send(Note(1, bytes(200)))
    left.pipe.send(Note(2))
    await until(lambda: right.heard)
    left.pipe.close()
    right.pipe.close()
    right.pipe.close()
