"""The network of the fault tests does what it says: else those would test nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.integration import network
from tests.integration.network import Network

_NUM_PACKETS = 2000


@pytest.fixture
def net() -> Iterator[Network]:
    """Three nodes."""
    if reason := network.missing():
        pytest.skip(reason)
    made = Network(("one", "two", "three"))
    yield made
    made.close()


def _num_received(net: Network, sender: str, receiver: str, num_packets: int) -> int:
    with net.entered(receiver):
        inbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        inbox.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        inbox.bind((net.addresses[receiver], 0))
    with net.entered(sender):
        outbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with inbox, outbox:
        inbox.setblocking(False)
        num_received = 0
        # In small parts: neither buffer may overflow.
        for _ in range(0, num_packets, 50):
            for _ in range(50):
                outbox.sendto(b"x", inbox.getsockname())
            try:
                for _ in range(50):
                    inbox.recv(16)
                    num_received += 1
            except BlockingIOError:
                pass
        return num_received


def test_a_share_of_one_pairs_packets_is_lost(net: Network) -> None:
    _num_received(net, "one", "two", 50)  # the addresses are resolved now
    assert _num_received(net, "one", "two", _NUM_PACKETS) == _NUM_PACKETS
    net.drop("one", "two", 0.1)
    for sender, receiver in (("one", "two"), ("two", "one")):
        lost = 1 - _num_received(net, sender, receiver, _NUM_PACKETS) / _NUM_PACKETS
        assert 0.07 < lost < 0.13
    _num_received(net, "one", "three", 50)
    assert _num_received(net, "one", "three", _NUM_PACKETS) == _NUM_PACKETS
    net.heal()
    assert _num_received(net, "one", "two", _NUM_PACKETS) == _NUM_PACKETS


def test_two_are_parted_and_others_are_not(net: Network) -> None:
    for sender in ("one", "two"):
        _num_received(net, sender, "three", 50)
    net.drop("one", "three", 1.0)
    net.drop("one", "two", 1.0)
    assert _num_received(net, "one", "two", 100) == 0
    assert _num_received(net, "three", "one", 100) == 0
    assert _num_received(net, "two", "three", 100) == 100


def test_a_slow_link_takes_its_time(net: Network) -> None:
    net.slow_down("one", "two", mbit_s=8, delay_ms=5)
    num_bytes = 500_000
    with net.entered("two"):
        listener = socket.create_server((net.addresses["two"], 0))
    with net.entered("one"):
        sending = socket.create_connection(listener.getsockname(), timeout=10)
    receiving, _ = listener.accept()
    with listener, sending, receiving:
        start_s = time.monotonic()
        sender = threading.Thread(target=sending.sendall, args=(bytes(num_bytes),))
        sender.start()
        num_received = 0
        while num_received < num_bytes:
            num_received += len(receiving.recv(1 << 16))
        sender.join()
        took_s = time.monotonic() - start_s
    assert took_s > 0.8 * num_bytes * 8 / 8e6


def test_a_pulled_cable(net: Network) -> None:
    _num_received(net, "one", "two", 50)
    net.pull_cable("two")
    assert _num_received(net, "one", "two", 50) == 0
    net.heal()
    _num_received(net, "one", "two", 50)
    assert _num_received(net, "one", "two", 50) == 50


def test_what_a_dead_process_left_is_removed(net: Network) -> None:
    script = (
        "import os, subprocess, sys; from tests.integration.network import Network\n"
        "made = Network(['one'])\n"
        "subprocess.Popen(made.inside('one', ['sleep', '60']), stdout=subprocess.DEVNULL)\n"
        "print(os.getpid(), flush=True)\n"
        "os._exit(1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(),
        check=False,
    )
    prefix = f"pdmesh-test-{done.stdout.strip()}-"
    assert any(name.startswith(prefix) for name in os.listdir("/run/netns"))
    network.remove_stale()
    assert not any(name.startswith(prefix) for name in os.listdir("/run/netns"))
    assert any(name.startswith(f"pdmesh-test-{os.getpid()}-") for name in os.listdir("/run/netns"))


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
