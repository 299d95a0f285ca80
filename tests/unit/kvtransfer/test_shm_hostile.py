"""A receiver of shared memory against dialers that break the rules: closed, nothing written."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvtransfer.errors import TransportError
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.memory.segments import SegmentSize
from kvtransfer.transports.address import unpack_address
from kvtransfer.transports.base import Arrival
from kvtransfer.transports.socket.frame import FRAME_VERSION, GREETING, MAGIC, pack_frame_head
from kvtransfer.transports.socket.shm import ShmEndpointName, ShmTransport
from mesh.shared_mapping import SharedMapping

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")
PAGE = os.sysconf("SC_PAGE_SIZE")
WHOLE = SegmentSize(PAGE, PAGE)


class Target:
    """A transport with one endpoint for ``p`` that may write blocks 1 and 2."""

    def __init__(self) -> None:
        self.memory = BlockMemory.allocate(4, PAGE)
        self.transport = ShmTransport(self.memory)
        address = self.transport.open_endpoint("p")
        endpoint = unpack_address(address, transport="shm").endpoint
        self.name = msgspec.msgpack.decode(endpoint, type=ShmEndpointName)
        self.transport.grant_writes("p", [1, 2])
        self.greeting = GREETING.pack(MAGIC, FRAME_VERSION, self.name.token)
        self.arrivals: list[Arrival] = []

    def dial(self) -> socket.socket:
        dialer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        dialer.connect(f"\0{self.name.socket}")
        return dialer

    def poll_until(self, is_reached: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 60
        while not is_reached():
            assert time.monotonic() < deadline_s
            self.arrivals += self.transport.poll_arrivals()

    def expect_hang_up(self, dialer: socket.socket) -> None:
        dialer.setblocking(False)

        def is_closed() -> bool:
            try:
                return dialer.recv(100) == b""
            except BlockingIOError:
                return False
            except ConnectionResetError:
                return True

        self.poll_until(is_closed)
        assert not any(self.memory.buffer)


@pytest.fixture
def target() -> Iterator[Target]:
    target = Target()
    yield target
    target.transport.close()


@pytest.fixture
def pool() -> SharedMapping:
    mapping = SharedMapping(2 * PAGE)
    mapping.memory[:] = b"k" * (2 * PAGE)
    return mapping


def test_a_frame_is_copied(target: Target, pool: SharedMapping) -> None:
    with target.dial() as dialer:
        socket.send_fds(dialer, [target.greeting], [pool.fd])
        dialer.sendall(pack_frame_head(b"h", WHOLE, [2], [1]))
        target.poll_until(lambda: bool(target.arrivals))
    assert target.arrivals == [Arrival("p", b"h")]
    assert bytes(target.memory.block(2)) == b"k" * PAGE
    assert not any(target.memory.block(1))


@pytest.mark.parametrize(
    "ids",
    [([3], [0]), ([1, 1], [0, 1]), ([1], [2]), ([1], [(1 << 32) - 1])],
    ids=["not granted", "twice", "outside its pool", "far outside"],
)
def test_bad_frames(target: Target, pool: SharedMapping, ids: tuple[list[int], list[int]]) -> None:
    with target.dial() as dialer:
        socket.send_fds(dialer, [target.greeting], [pool.fd])
        dialer.sendall(pack_frame_head(b"h", WHOLE, *ids))
        target.expect_hang_up(dialer)
    assert target.arrivals == []


def test_a_pool_that_could_shrink(target: Target) -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE)
    with target.dial() as dialer:
        socket.send_fds(dialer, [target.greeting], [fd])
        target.expect_hang_up(dialer)
    os.close(fd)


def test_a_greeting_without_a_pool(target: Target) -> None:
    with target.dial() as dialer:
        dialer.sendall(target.greeting)
        target.expect_hang_up(dialer)


def test_a_file_that_is_no_memory(target: Target) -> None:
    read_end, write_end = os.pipe()
    with target.dial() as dialer:
        socket.send_fds(dialer, [target.greeting], [read_end])
        target.expect_hang_up(dialer)
    os.close(read_end)
    os.close(write_end)


def test_a_stranger(target: Target, pool: SharedMapping) -> None:
    with target.dial() as dialer:
        socket.send_fds(dialer, [GREETING.pack(MAGIC, FRAME_VERSION, b"0" * 16)], [pool.fd])
        target.expect_hang_up(dialer)


def test_a_fenced_peer_writes_nothing(target: Target, pool: SharedMapping) -> None:
    with target.dial() as dialer:
        socket.send_fds(dialer, [target.greeting], [pool.fd])
        for _ in range(3):
            target.transport.poll_arrivals()
        dialer.sendall(pack_frame_head(b"h", WHOLE, [1], [0]))
        target.transport.fence("p")
        target.expect_hang_up(dialer)


def test_sending_needs_a_shared_pool(target: Target) -> None:
    private = ShmTransport(BlockMemory(bytearray(64), num_blocks=4, block_bytes=16))
    address = target.transport.open_endpoint("q")
    with pytest.raises(TransportError, match="shared mapping"):
        private.connect("d", address)
    private.close()
