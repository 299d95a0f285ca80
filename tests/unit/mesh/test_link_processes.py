"""A link to another process, which is killed or frozen."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.errors import WorkerLost
from mesh.links.listen import SILENCE_S
from mesh.messages import PeerRef, StatusRequest
from tests.unit.loop_lag import watched_loop
from tests.unit.mesh.recording_links import EPOCH, Dialer
from tests.unit.mesh.until import until

_ROOT = Path(__file__).parents[3]


class Peer:
    """A WorkerServer in another process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.mesh.link_peer", str(EPOCH)],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ref = PeerRef(worker_id="w0", epoch=EPOCH, endpoint=self.read_line())

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


async def test_a_killed_process_is_down_at_once(peer: Peer) -> None:
    dialer = Dialer(peer.ref)
    await dialer.link.connect()
    dialer.link.send(StatusRequest(seq=1))
    await until(lambda: dialer.messages == [StatusRequest(seq=2)])
    peer.process.kill()
    await until(lambda: dialer.down)
    assert isinstance(dialer.down[0], WorkerLost)
    assert "broke" in str(dialer.down[0]), "not by its silence"
    assert not dialer.link.send(StatusRequest(seq=3))


async def test_a_frozen_process_is_down_after_the_silence(peer: Peer) -> None:
    dialer = Dialer(peer.ref)
    await dialer.link.connect()
    os.kill(peer.process.pid, signal.SIGSTOP)
    started_s = time.monotonic()
    async with watched_loop() as lag:
        await until(lambda: dialer.down)
    assert SILENCE_S - 0.5 < time.monotonic() - started_s < SILENCE_S + 1.0 + 10 * lag.worst_s
    assert isinstance(dialer.down[0], WorkerLost)
    os.kill(peer.process.pid, signal.SIGCONT)
    # The thawed worker learns that its dialer is gone, and takes a new link.
    assert await asyncio.to_thread(peer.read_line) == "down g0"
    again = Dialer(peer.ref)
    await again.link.connect()
    await again.link.close()
