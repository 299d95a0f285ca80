"""Senders and receivers of one process over one transport, joined by an in-memory control link."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtransfer.events import BlocksReleased, Committed, ReceiveFailed, SendDone, SendFailed
from kvtransfer.memory.layout import BlockLayout
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.memory.staging import StagingBlocks
from kvtransfer.receiver.receiver import TransferReceiver
from kvtransfer.sender.sender import TransferSender
from kvtransfer.transports.base import Transport
from kvtransfer.transports.factory import make_transport
from kvtransfer.transports.inproc import InprocFabric, InprocTransport
from mesh import codec
from mesh.messages import AnyMessage, PeerRef

FINGERPRINT = "layout-1"
LEASE_S = 10.0
BLOCK_BYTES = 40_000
"""Not a multiple of the page size."""
NUM_BLOCKS = 64
POISON = 0xEE


class FakeClock:
    """Moves only when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Node:
    """One worker: a sender or a receiver."""

    worker_id: str
    epoch: int
    memory: BlockMemory
    transport: Transport
    role: TransferSender | TransferReceiver | None = None
    events: list[object] = field(default_factory=list)
    is_frozen: bool = False

    @property
    def sender(self) -> TransferSender:
        assert isinstance(self.role, TransferSender)
        return self.role

    @property
    def receiver(self) -> TransferReceiver:
        assert isinstance(self.role, TransferReceiver)
        return self.role

    @property
    def ref(self) -> PeerRef:
        return PeerRef(worker_id=self.worker_id, epoch=self.epoch, endpoint="tcp://nowhere:1")

    def bytes_of(self, block_id: int) -> bytes:
        return bytes(self.memory.block(block_id))

    def is_poisoned(self, block_id: int) -> bool:
        return self.bytes_of(block_id) == bytes([POISON]) * self.memory.block_bytes


class Cluster:
    """Delivers encoded messages in order; frozen nodes neither poll nor receive."""

    def __init__(self, transport_name: str) -> None:
        self.transport_name = transport_name
        self.fabric = InprocFabric()
        self.clock = FakeClock()
        self.nodes: dict[str, Node] = {}
        self.wire: deque[tuple[str, str, bytes]] = deque()
        self.log: list[tuple[str, str, AnyMessage]] = []
        self._retired: list[Node] = []
        self._rng = np.random.default_rng()

    def add_sender(
        self, worker_id: str, epoch: int = 1, *, layout: BlockLayout | None = None,
        num_staging: int = 0, **options: Any,
    ) -> Node:  # fmt: skip
        node = self._add(worker_id, epoch, layout, num_staging)
        self._rng_fill(node)
        node.role = TransferSender(
            worker_id=worker_id,
            epoch=epoch,
            fingerprint=FINGERPRINT,
            transport=node.transport,
            send=lambda peer, message: self._send(worker_id, peer, message),
            layout=layout,
            staging=StagingBlocks(NUM_BLOCKS, num_staging),
            lease_s=LEASE_S,
            clock=self.clock,
            **options,
        )
        return node

    def add_receiver(
        self, worker_id: str, epoch: int = 1, *, layout: BlockLayout | None = None, **options: Any
    ) -> Node:
        node = self._add(worker_id, epoch, layout)
        np.frombuffer(node.memory.buffer, np.uint8)[:] = POISON
        node.role = TransferReceiver(
            worker_id=worker_id,
            epoch=epoch,
            fingerprint=FINGERPRINT,
            transport=node.transport,
            send=lambda peer, message: self._send(worker_id, peer, message),
            layout=layout,
            lease_s=LEASE_S,
            clock=self.clock,
            **options,
        )
        return node

    def step(self) -> None:
        """Deliver what is on the wire, then poll every node once."""
        for _ in range(len(self.wire)):
            source, target, data = self.wire.popleft()
            node = self.nodes.get(target)
            if node is None:
                continue
            if node.is_frozen:
                self.wire.append((source, target, data))
                continue
            message = codec.decode(data)
            self.log.append((source, target, message))
            assert node.role is not None
            node.role.on_message(source, message)  # type: ignore[arg-type]
        for node in list(self.nodes.values()):
            if not node.is_frozen:
                assert node.role is not None
                node.events.extend(node.role.poll())

    def run_until(self, is_reached: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Step until the condition holds; the fake clock stands still meanwhile."""
        deadline_s = time.monotonic() + timeout_s
        while not is_reached():
            assert time.monotonic() < deadline_s, self.describe()
            self.step()

    def advance(self, seconds: float) -> None:
        """Move the clock in steps shorter than any renewal interval."""
        while seconds > 0:
            self.clock.now_s += min(seconds, 0.5)
            seconds -= 0.5
            self.step()

    def settle(self) -> None:
        """Enough turns for anything still on its way to show."""
        for _ in range(50):
            self.step()
            time.sleep(0.001)

    def describe(self) -> str:
        return repr({n.worker_id: n.events for n in self.nodes.values()}) + repr(self.log[-10:])

    def remove(self, node: Node) -> None:
        """A process that is gone: its transport is closed with it."""
        del self.nodes[node.worker_id]
        self._retired.append(node)
        node.transport.close()

    def close(self) -> None:
        for node in [*self.nodes.values(), *self._retired]:
            node.transport.close()

    def _send(self, source: str, target: str, message: AnyMessage) -> bool:
        if target not in self.nodes:
            return False
        self.wire.append((source, target, codec.encode(message)))
        return True

    def _add(
        self, worker_id: str, epoch: int, layout: BlockLayout | None, num_staging: int = 0
    ) -> Node:
        block_bytes = BLOCK_BYTES if layout is None else layout.block_bytes
        memory = BlockMemory.allocate(NUM_BLOCKS + num_staging, block_bytes)
        transport = (
            InprocTransport(memory, fabric=self.fabric)
            if self.transport_name == "inproc"
            else make_transport(self.transport_name, memory, worker_id, epoch)
        )
        node = Node(worker_id, epoch, memory, transport)
        self.nodes[worker_id] = node
        return node

    def _rng_fill(self, node: Node) -> None:
        view = np.frombuffer(node.memory.buffer, np.uint8)
        view[:] = self._rng.integers(0, 256, len(view), dtype=np.uint8)


def committed(node: Node) -> set[str]:
    """Transfers that the receiver committed."""
    return {e.transfer_id for e in node.events if isinstance(e, Committed)}


def released(node: Node) -> dict[str, tuple[int, ...]]:
    """Blocks that the receiver released, by transfer; at most once each."""
    events = [e for e in node.events if isinstance(e, BlocksReleased)]
    assert len({e.transfer_id for e in events}) == len(events), "released twice"
    return {e.transfer_id: e.block_ids for e in events}


def failures(node: Node) -> dict[str, str]:
    """Codes of failed transfers on either side; at most once each."""
    events = [e for e in node.events if isinstance(e, ReceiveFailed | SendFailed)]
    assert len({e.transfer_id for e in events}) == len(events), "failed twice"
    return {e.transfer_id: e.code for e in events}


def sent(node: Node) -> set[str]:
    """Transfers that the sender finished well."""
    return {e.transfer_id for e in node.events if isinstance(e, SendDone)}
