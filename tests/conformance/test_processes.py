"""Real processes that are killed and frozen in the middle of a transfer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.events import BlocksReleased, Committed, ReceiveFailed
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.receiver.receiver import TransferReceiver
from kvtransfer.sender.sender import TransferSender
from kvtransfer.transports.factory import make_transport
from mesh.messages import AnyMessage, Grant, PeerRef
from tests.conformance.cluster import FINGERPRINT
from tests.conformance.conftest import UCX
from tests.conformance.sender_process import PATTERN, MessagePipe, pack

NUM_BLOCKS = 128
BLOCK_BYTES = 1 << 20
ROOT = Path(__file__).parents[2]


def child_command(module: str, transport_name: str, *more: str) -> list[str]:
    sizes = (str(NUM_BLOCKS), str(BLOCK_BYTES))
    return [sys.executable, "-m", f"tests.conformance.{module}", transport_name, *sizes, *more]


class RemoteSender:
    """The receiver's view of a ``sender_process``."""

    def __init__(
        self, transport_name: str, mode: str = "chunks", *, has_alias: bool = True
    ) -> None:
        if has_alias:
            self.memory = BlockMemory.allocate(NUM_BLOCKS, BLOCK_BYTES)
        else:
            private = np.empty(NUM_BLOCKS * BLOCK_BYTES, np.uint8)
            self.memory = BlockMemory(private, num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES)
        self.bytes = np.frombuffer(self.memory.buffer, np.uint8)
        self.bytes[:] = 0  # also faults the pages in
        self.transport = make_transport(transport_name, self.memory, "d", 1)
        self.receiver = TransferReceiver(
            worker_id="d",
            epoch=1,
            fingerprint=FINGERPRINT,
            transport=self.transport,
            send=self._send,
            lease_s=0.5,
        )
        self.events: list[object] = []
        self.process = subprocess.Popen(
            child_command("sender_process", transport_name, mode),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        assert self.process.stderr.readline() == b"ready\n", self.process.stderr.read()
        self._pipe = MessagePipe(self.process.stdout.fileno())

    def open(self, transfer_id: str, num_blocks: int = NUM_BLOCKS) -> None:
        ref = PeerRef(worker_id="p", epoch=1, endpoint="pipe")
        self.receiver.open(transfer_id, ref, list(reversed(range(num_blocks))), 0)

    def step(self) -> None:
        try:
            for message in self._pipe.read():
                self.receiver.on_message("p", message)  # type: ignore[arg-type]
        except EOFError:
            self.receiver.on_peer_down("p")
        self.events.extend(self.receiver.poll())

    def run_until(self, is_reached: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_reached():
            assert time.monotonic() < deadline_s, self.events
            self.step()

    def has(self, kind: type) -> bool:
        return any(isinstance(event, kind) for event in self.events)

    def num_written(self) -> int:
        return int(np.count_nonzero(self.bytes[::4096] == PATTERN))

    def _send(self, peer_id: str, message: AnyMessage) -> bool:
        assert self.process.stdin is not None
        try:
            os.write(self.process.stdin.fileno(), pack(message))
        except BrokenPipeError:
            return False
        return True

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        self.transport.close()


@pytest.fixture(params=["shm", "tcp", UCX])
def transport_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def remote(transport_name: str) -> Iterator[RemoteSender]:
    remote = RemoteSender(transport_name)
    yield remote
    remote.close()


@pytest.fixture(params=["tcp", UCX])
def writing_transport_name(request: pytest.FixtureRequest) -> str:
    """Transports whose sender moves the bytes; with ``shm`` it is the receiver."""
    name: str = request.param
    return name


@pytest.fixture
def writing_remote(writing_transport_name: str) -> Iterator[RemoteSender]:
    remote = RemoteSender(writing_transport_name)
    yield remote
    remote.close()


@pytest.fixture(params=[True, False], ids=["shared", "private"])
def raw_remote(
    writing_transport_name: str, request: pytest.FixtureRequest
) -> Iterator[RemoteSender]:
    remote = RemoteSender(writing_transport_name, "raw", has_alias=request.param)
    yield remote
    remote.close()


def test_between_processes(remote: RemoteSender) -> None:
    remote.open("t")
    remote.run_until(lambda: remote.has(Committed))
    assert (remote.bytes == PATTERN).all()


def test_killed_sender(remote: RemoteSender) -> None:
    remote.open("t")
    remote.run_until(lambda: remote.num_written() > 0)
    remote.process.kill()
    remote.run_until(lambda: remote.has(BlocksReleased) or remote.has(Committed))
    if not remote.has(Committed):
        assert remote.has(ReceiveFailed)
    assert remote.receiver.num_open == 0
    remote.process.wait()


def test_frozen_sender_never_writes_after_the_release(writing_remote: RemoteSender) -> None:
    remote = writing_remote
    remote.open("t")
    remote.run_until(lambda: remote.num_written() > 0)
    remote.process.send_signal(signal.SIGSTOP)
    remote.run_until(lambda: remote.has(BlocksReleased) or remote.has(Committed))
    assert remote.has(BlocksReleased), "too fast to be stopped midway"
    remote.bytes[:] = 0
    remote.process.send_signal(signal.SIGCONT)
    deadline_s = time.monotonic() + 0.5
    while time.monotonic() < deadline_s:
        remote.step()
    assert remote.num_written() == 0
    # The same process is served again, over a fresh endpoint.
    remote.events.clear()
    remote.open("t2", 4)
    remote.run_until(lambda: remote.has(Committed))
    assert remote.num_written() == 4 * BLOCK_BYTES // 4096


def test_fence_of_a_sender_stopped_inside_a_write(raw_remote: RemoteSender) -> None:
    """One call writes everything; the stop signal hits inside it (the case CMA makes dangerous)."""
    remote = raw_remote
    threshold = 2 * BLOCK_BYTES // 4096  # the second call has begun
    for attempt in range(20):  # whoever is not scheduled in time sees the whole write done
        remote.open(f"t{attempt}")
        remote.run_until(lambda: remote.num_written() > threshold)
        remote.process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        before = remote.num_written()
        if before < NUM_BLOCKS * BLOCK_BYTES // 4096:
            break
        remote.process.send_signal(signal.SIGCONT)
        time.sleep(0.5)  # it learns that its write is done
        remote.receiver.on_peer_down("p")
        remote.run_until(lambda: remote.receiver.num_open == 0)
        remote.events.clear()
        remote.bytes[:] = 0
    assert before < NUM_BLOCKS * BLOCK_BYTES // 4096, "too fast to be stopped midway"
    remote.receiver.on_peer_down("p")
    remote.run_until(lambda: remote.has(BlocksReleased))
    remote.bytes[:] = 0
    remote.process.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    assert remote.num_written() == 0


def test_killed_receiver(transport_name: str) -> None:
    """The roles swapped: this process sends, the child is killed between two writes."""
    memory = BlockMemory.allocate(NUM_BLOCKS, BLOCK_BYTES)
    transport = make_transport(transport_name, memory, "p", 1)
    child = subprocess.Popen(
        child_command("receiver_process", transport_name),
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        assert child.stdout is not None
        sent: list[AnyMessage] = []
        sender = TransferSender(
            worker_id="p",
            epoch=1,
            fingerprint=FINGERPRINT,
            transport=transport,
            send=lambda peer, message: sent.append(message) is None,
            lease_s=30,
        )
        pipe = MessagePipe(child.stdout.fileno())
        events: list[object] = []
        sender.expect("t", "d", 60)
        sender.submit("t", 0, [0])
        deadline_s = time.monotonic() + 60
        grants: list[AnyMessage] = []
        while not grants and time.monotonic() < deadline_s:
            grants = [message for message in pipe.read() if isinstance(message, Grant)]
        sender.on_message("d", grants[0])  # type: ignore[arg-type]
        connected_s = time.monotonic() + 0.3
        while time.monotonic() < connected_s:
            events.extend(sender.poll())
        child.kill()
        child.wait()
        sender.submit("t", 1, list(range(1, NUM_BLOCKS)))
        while sender.num_open and time.monotonic() < deadline_s:
            events.extend(sender.poll())
        assert [type(event).__name__ for event in events] == ["SendFailed"]
        # unreachable: it was killed before the first write had come through
        assert events[0].code in ("peer_lost", "write_aborted", "unreachable")  # type: ignore[attr-defined]
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
        transport.close()
