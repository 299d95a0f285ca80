"""A TCP receiver against dialers that break the rules: closed at once, nothing written."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator

import msgspec
import pytest

from kvtransfer.errors import BadAddress, PeerLost
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.memory.segments import SegmentSize
from kvtransfer.transports.address import pack_address, unpack_address
from kvtransfer.transports.base import Arrival
from kvtransfer.transports.socket.frame import FRAME_VERSION, GREETING, MAGIC, pack_frame_head
from kvtransfer.transports.socket.tcp import TcpEndpointName, TcpTransport

BLOCK = b"evil" * 4
WHOLE = SegmentSize(16, 16)


class Target:
    """A transport with one endpoint for ``p`` that may write blocks 1 and 2."""

    def __init__(self) -> None:
        self.memory = BlockMemory(bytearray(64), num_blocks=4, block_bytes=16)
        self.transport = TcpTransport(self.memory)
        address = self.transport.open_endpoint("p")
        self.address = address
        endpoint = unpack_address(address, transport="tcp").endpoint
        self.name = msgspec.msgpack.decode(endpoint, type=TcpEndpointName)
        self.transport.grant_writes("p", [1, 2])
        self.greeting = GREETING.pack(MAGIC, FRAME_VERSION, self.name.token)
        self.arrivals: list[Arrival] = []

    def dial(self) -> socket.socket:
        return socket.create_connection((self.name.host, self.name.port))

    def is_hung_up_on(self, dialer: socket.socket) -> bool:
        dialer.setblocking(False)
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            self.arrivals += self.transport.poll_arrivals()
            try:
                if dialer.recv(100) == b"":
                    return True
            except BlockingIOError:
                continue
            except ConnectionResetError:
                return True
        return False


@pytest.fixture
def target() -> Iterator[Target]:
    target = Target()
    yield target
    target.transport.close()


def test_listens_on_loopback_only(target: Target) -> None:
    assert target.name.host == "127.0.0.1"


@pytest.mark.parametrize(
    "make",
    [
        lambda t: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        lambda t: GREETING.pack(MAGIC, FRAME_VERSION, b"0" * 16),
        lambda t: GREETING.pack(MAGIC, 99, t.name.token),
        lambda t: t.greeting + struct.pack("<IIQQ", 1 << 30, 1, 16, 16),
        lambda t: t.greeting + struct.pack("<IIQQ", 1, 1 << 30, 16, 16),
        lambda t: t.greeting + struct.pack("<IIQQ", 1, 0, 16, 16),
        lambda t: t.greeting + pack_frame_head(b"h", WHOLE, [3]) + BLOCK,
        lambda t: t.greeting + pack_frame_head(b"h", WHOLE, [1, 1]) + BLOCK * 2,
        lambda t: t.greeting + pack_frame_head(b"h", WHOLE, [1, 4000]) + BLOCK * 2,
    ],
)
def test_hostile_bytes(target: Target, make: object) -> None:
    with target.dial() as dialer:
        dialer.sendall(make(target))  # type: ignore[operator]
        assert target.is_hung_up_on(dialer)
    assert target.arrivals == []
    assert bytes(target.memory.buffer) == bytes(64)


def test_a_block_is_written_once(target: Target) -> None:
    with target.dial() as dialer:
        dialer.sendall(target.greeting + pack_frame_head(b"h", WHOLE, [1]) + BLOCK)
        dialer.sendall(pack_frame_head(b"h", WHOLE, [1]) + b"x" * 16)
        assert target.is_hung_up_on(dialer)
    assert target.arrivals == [Arrival("p", b"h")]
    assert bytes(target.memory.block(1)) == BLOCK


def test_truncated_frame(target: Target) -> None:
    with target.dial() as dialer:
        dialer.sendall(target.greeting + pack_frame_head(b"h", WHOLE, [1, 2]) + BLOCK + b"ev")
        dialer.shutdown(socket.SHUT_WR)
        assert target.is_hung_up_on(dialer)
    assert target.arrivals == []


@pytest.mark.parametrize("how", ["fence", "forbid"])
def test_withdrawn_midway(target: Target, how: str) -> None:
    with target.dial() as dialer:
        dialer.sendall(target.greeting + pack_frame_head(b"h", WHOLE, [1, 2]) + BLOCK)
        deadline_s = time.monotonic() + 60
        while bytes(target.memory.block(1)) != BLOCK and time.monotonic() < deadline_s:
            target.transport.poll_arrivals()
        if how == "fence":
            target.transport.fence("p")
        else:
            target.transport.revoke_writes("p", [2])
        assert target.is_hung_up_on(dialer)
    assert bytes(target.memory.block(2)) == bytes(16)


def test_fenced_token_is_dead(target: Target) -> None:
    target.transport.fence("p")
    assert target.transport.open_endpoint("p") != target.address
    with target.dial() as dialer:
        dialer.sendall(target.greeting)
        assert target.is_hung_up_on(dialer)


def test_receipts_that_lie() -> None:
    memory = BlockMemory(bytearray(64), num_blocks=4, block_bytes=16)
    transport = TcpTransport(memory)
    with socket.create_server(("127.0.0.1", 0)) as server:
        name = msgspec.msgpack.encode(
            TcpEndpointName("127.0.0.1", server.getsockname()[1], b"t" * 16)
        )
        connection = transport.connect("d", pack_address("tcp", memory, 0, name))
        write = connection.write([0], [1], b"h", WHOLE)
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(struct.pack("<Q", 7))
            time.sleep(0.05)  # loopback: the receipt is there
            with pytest.raises(PeerLost, match="receipt"):
                write.poll()
    transport.close()


def test_connect_checks_the_endpoint() -> None:
    memory = BlockMemory(bytearray(64), num_blocks=4, block_bytes=16)
    transport = TcpTransport(memory)
    for name in (b"", msgspec.msgpack.encode(TcpEndpointName("h", 70000, b"t" * 16))):
        with pytest.raises(BadAddress):
            transport.connect("d", pack_address("tcp", memory, 0, name))
    transport.close()
