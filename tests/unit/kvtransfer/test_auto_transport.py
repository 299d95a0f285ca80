"""Which data plane two workers agree on, and what happens where it does not reach."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtransfer.errors import BadAddress, PeerLost, TransportError, Unreachable
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.transports.address import pack_address, transport_of
from kvtransfer.transports.auto import AutoTransport
from kvtransfer.transports.base import Write
from kvtransfer.transports.socket.dial import SocketConnection
from kvtransfer.transports.socket.shm import host_id

ALL = ("shm", "ucx", "tcp")


def make(memory: BlockMemory) -> AutoTransport:
    return AutoTransport(memory, worker_id="w", epoch=1, host="127.0.0.1", advertise_host="")


@pytest.fixture
def auto() -> Iterator[AutoTransport]:
    transport = make(BlockMemory.allocate(4, 4096))
    yield transport
    transport.close()


def test_what_is_offered_depends_on_the_pool(auto: AutoTransport) -> None:
    assert auto.names[0] == "shm"
    assert auto.names[-1] == "tcp"
    private = make(BlockMemory(bytearray(64), num_blocks=4, block_bytes=16))
    assert "shm" not in private.names


@pytest.mark.parametrize(
    ("offered", "is_here", "chosen"),
    [
        (ALL, True, "shm"),
        (ALL, False, "ucx"),
        (("tcp",), True, "tcp"),
        (("shm", "tcp"), False, "tcp"),
    ],
)
def test_the_best_that_both_have(
    auto: AutoTransport, offered: tuple[str, ...], is_here: bool, chosen: str
) -> None:
    if chosen not in auto.names:
        pytest.skip("NIXL is not installed")
    assert not auto.has_met("p")
    auto.meet("p", offered, host_id() if is_here else "another")
    assert auto.has_met("p")
    assert auto.name_for("p") == chosen


def test_nothing_in_common(auto: AutoTransport) -> None:
    auto.meet("p", ("shm",), "another")
    with pytest.raises(TransportError, match="none of these joins them"):
        auto.open_endpoint("p")


def test_an_endpoint_that_does_not_reach_is_replaced_by_another_kind(auto: AutoTransport) -> None:
    auto.meet("p", ("shm", "tcp"), host_id())
    first = auto.open_endpoint("p")
    assert transport_of(first) == "shm"
    auto.avoid("p")
    assert auto.fence("p")
    assert transport_of(auto.open_endpoint("p")) == "tcp"
    auto.say_goodbye("p")
    assert auto.has_met("p"), "its endpoint is still open"
    auto.fence("p")
    auto.say_goodbye("p")
    assert not auto.has_met("p")


def test_an_open_endpoint_keeps_its_kind_when_the_link_comes_back(auto: AutoTransport) -> None:
    auto.meet("p", ("tcp",), host_id())
    address = auto.open_endpoint("p")
    auto.meet("p", ALL, host_id())
    assert auto.open_endpoint("p") == address


def test_only_addresses_of_own_transports_are_dialed(auto: AutoTransport) -> None:
    with pytest.raises(BadAddress, match="inproc"):
        auto.connect("d", pack_address("inproc", auto.memory, 0, b"x"))
    with pytest.raises(BadAddress):
        auto.connect("d", b"nonsense")


def test_an_endpoint_that_is_gone(auto: AutoTransport) -> None:
    other = make(BlockMemory.allocate(4, 4096))
    other.meet("p", ("shm", "tcp"), host_id())
    shm = other.open_endpoint("p")
    other.avoid("p")
    other.fence("p")
    tcp = other.open_endpoint("p")
    other.close()
    with pytest.raises(Unreachable):
        auto.connect("d", shm)
    connection = auto.connect("d", tcp)
    assert isinstance(connection, SocketConnection)
    write = connection.write([0], [0], b"h", auto.memory.whole)
    with pytest.raises(PeerLost):
        poll_for_ever(write)


def poll_for_ever(write: Write) -> None:
    for _ in range(100_000):
        write.poll()
