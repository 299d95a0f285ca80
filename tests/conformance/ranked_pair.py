"""A prefill and a decode worker of several ranks each, over the real data plane of one process.

Links between the workers and pipes between ranks carry encoded messages, as between processes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvtransfer.events import ReceiverEvent, SenderEvent
from kvtransfer.memory.layout import BlockLayout
from kvtransfer.ranks.messages import (
    Outgoing,
    ReceiveCommand,
    ReceiveReport,
    SendCommand,
    SendReport,
)
from kvtransfer.ranks.names import by_worker, rank_peer
from kvtransfer.ranks.receiver import RankedReceiver
from kvtransfer.ranks.remote_receiver import ReceiverSide, RemoteReceiver
from kvtransfer.ranks.remote_sender import RemoteSender, SenderSide
from kvtransfer.ranks.sender import RankedSender
from kvtransfer.receiver.receiver import TransferReceiver
from kvtransfer.sender.sender import TransferSender
from mesh import codec
from mesh.kv_heads import heads_of_rank
from mesh.messages import PeerRef, TransferMessage
from tests.conformance.cluster import FINGERPRINT, LEASE_S, NUM_BLOCKS, Cluster

NUM_ROWS, HEAD_BYTES = 6, 320


class RankedPair:
    """Steps both workers' ranks; ``p_events`` and ``d_events`` are what rank 0 of each hears."""

    def __init__(self, cluster: Cluster, senders: int, receivers: int, num_heads: int) -> None:
        self.p_events: list[SenderEvent] = []
        self.d_events: list[ReceiverEvent] = []
        self.to_p: deque[bytes] = deque()
        self.to_d: deque[bytes] = deque()
        self.to_d_log: list[TransferMessage] = []
        self.computed = 0
        """Steps that P's followers have done."""
        self.p_ref = PeerRef(
            worker_id="p", epoch=1, endpoint="tcp://nowhere:1", tensor_parallel=senders
        )
        self.d_ref = msgspec.structs.replace(self.p_ref, worker_id="d", tensor_parallel=receivers)
        self._pipes: deque[Callable[[], object]] = deque()
        self.model = np.random.default_rng().integers(
            0, 256, (NUM_BLOCKS, NUM_ROWS, num_heads, HEAD_BYTES), np.uint8
        )
        self._num_heads = num_heads
        common: dict[str, Any] = {
            "epoch": 1, "fingerprint": FINGERPRINT, "lease_s": LEASE_S, "clock": cluster.clock,
        }  # fmt: skip
        self.p_nodes, self.d_nodes = [], []
        self.p_sides: list[SenderSide] = []
        self.d_sides: list[ReceiverSide] = []
        self.p_senders: list[TransferSender] = []
        remote_senders: list[RemoteSender] = []
        remote_receivers: list[RemoteReceiver] = []
        for rank in range(senders):
            layout = self._layout(rank, senders)
            node = cluster._add(rank_peer("p", rank), 1, layout)
            held = self.model[:, :, layout.heads.start : layout.heads.stop]
            node.memory.array[:] = np.ascontiguousarray(held).reshape(-1)
            self.p_nodes.append(node)
            report = self._pipe(SendReport, lambda message, rank=rank: remote_senders[
                rank - 1
            ].on_report(message))  # fmt: skip
            sender = TransferSender(
                worker_id="p", transport=node.transport, layout=layout, rank=rank, num_parts=2,
                send=by_worker(self._to_d) if rank == 0 else _outgoing(report), **common,
            )  # fmt: skip
            self.p_senders.append(sender)
            if rank:
                side = SenderSide(sender, self._has_computed, None, report)
                tell = self._pipe(SendCommand, side.on_message)
                self.p_sides.append(side)
                remote_senders.append(
                    RemoteSender(tell, by_worker(self._to_d), LEASE_S, cluster.clock)
                )
        for rank in range(receivers):
            layout = self._layout(rank, receivers)
            node = cluster._add(rank_peer("d", rank), 1, layout)
            self.d_nodes.append(node)
            report = self._pipe(ReceiveReport, lambda message, rank=rank: remote_receivers[
                rank - 1
            ].on_report(message))  # fmt: skip
            receiver = TransferReceiver(
                worker_id="d", transport=node.transport, layout=layout,
                send=by_worker(self._to_p) if rank == 0 else _outgoing(report), **common,
            )  # fmt: skip
            if rank == 0:
                first = receiver
                continue
            receiver_side = ReceiverSide(receiver, None, report)
            tell = self._pipe(ReceiveCommand, receiver_side.on_message)
            self.d_sides.append(receiver_side)
            remote_receivers.append(
                RemoteReceiver(tell, by_worker(self._to_p), LEASE_S, cluster.clock)
            )
        self.p = RankedSender(self.p_senders[0], remote_senders, num_kv_heads=num_heads)
        self.d = RankedReceiver([first, *remote_receivers], num_kv_heads=num_heads)

    def step(self) -> None:
        """Everything that waits is delivered, then every rank polls once."""
        for _ in range(len(self._pipes)):
            self._pipes.popleft()()
        for _ in range(len(self.to_p)):
            self.p.on_message("d", codec.decode(self.to_p.popleft()))  # type: ignore[arg-type]
        for _ in range(len(self.to_d)):
            message = codec.decode(self.to_d.popleft())
            self.to_d_log.append(message)  # type: ignore[arg-type]
            self.d.on_message("p", message)  # type: ignore[arg-type]
        self.p_events += self.p.poll()
        self.d_events += self.d.poll()
        for side in (*self.p_sides, *self.d_sides):
            side.poll()

    def run_until(self, is_reached: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_reached():
            assert time.monotonic() < deadline_s, (self.p_events, self.d_events)
            self.step()

    def run_until_over(self) -> None:
        """No rank has an open transfer."""
        self.run_until(lambda: self.p.num_open == self.d.num_open == 0 and not self._pipes)

    def received(self, rank: int, block: int) -> npt.NDArray[np.uint8]:
        """A block of one of D's ranks as [rows, heads, head_bytes]."""
        data = np.frombuffer(self.d_nodes[rank].memory.block(block), np.uint8)
        return data.reshape(NUM_ROWS, -1, HEAD_BYTES)

    def expected(self, rank: int, block: int) -> npt.NDArray[np.uint8]:
        """What P's block is, of the heads of one of D's ranks."""
        heads = heads_of_rank(rank, len(self.d_nodes), self._num_heads)
        return self.model[block, :, heads.start : heads.stop]

    def _layout(self, rank: int, size: int) -> BlockLayout:
        heads = heads_of_rank(rank, size, self._num_heads)
        return BlockLayout(num_rows=NUM_ROWS, heads=heads, head_bytes=HEAD_BYTES)

    def _has_computed(self, step: int, part: int | None) -> bool:
        return self.computed >= step

    def _pipe(self, kind: Any, deliver: Callable[[Any], object]) -> Callable[[Any], bool]:
        decoder = msgspec.msgpack.Decoder(kind)

        def tell(message: Any) -> bool:
            data = msgspec.msgpack.encode(message)
            self._pipes.append(lambda: deliver(decoder.decode(data)))
            return True

        return tell

    def _to_d(self, peer_id: str, message: TransferMessage) -> bool:
        assert peer_id == "d"
        self.to_d.append(codec.encode(message))
        return True

    def _to_p(self, peer_id: str, message: TransferMessage) -> bool:
        assert peer_id == "p"
        self.to_p.append(codec.encode(message))
        return True


def _outgoing(tell: Callable[[Any], bool]) -> Callable[[str, TransferMessage], bool]:
    return lambda peer_id, message: tell(Outgoing(peer_id=peer_id, message=message))
