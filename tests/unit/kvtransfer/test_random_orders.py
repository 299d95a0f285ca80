"""Sender and receiver through random orders of everything that can happen between them.

Messages are delayed, reordered, dropped and repeated; writes land late, also from a sender that
gave up, froze or died; headers are lost and repeated; links fall; the sender restarts. Whatever
happens: a write never lands in a block that D has given back, every transfer ends exactly once on
both sides, every block comes back exactly once, and what was committed is what was sent.
"""

from __future__ import annotations

import itertools
import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtransfer.events import BlocksReleased, Committed, ReceiveFailed
from kvtransfer.memory.layout import BlockLayout
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.receiver.receiver import TransferReceiver
from kvtransfer.sender.sender import TransferSender
from mesh import codec
from mesh.kv_heads import Heads
from mesh.messages import AnyMessage, PeerRef
from tests.unit.kvtransfer.simulated_transport import (
    SimulatedNetwork,
    SimulatedTransport,
    SimulatedWrite,
)

NUM_BLOCKS = 24
LAYOUT = BlockLayout(num_rows=2, heads=Heads(start=0, stop=1), head_bytes=4)
LEASE_S = 10.0
FAULTS = (
    "cancel by d",
    "cancel by p",
    "repeat header",
    "lose header",
    "corrupt",
    "freeze",
    "wake",
    "wake",
    "link falls",
    "restart",
    "unnoticed restart",
)
PICK = st.integers(min_value=0, max_value=1 << 16)


class TransferMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.network = SimulatedNetwork()
        self.memory = {
            side: BlockMemory(bytearray(NUM_BLOCKS * 8), num_blocks=NUM_BLOCKS, block_bytes=8)
            for side in "pd"
        }
        for block_id in range(NUM_BLOCKS):
            self.memory["p"].block(block_id)[:] = (block_id + 1).to_bytes(4, "little") * 2
        self.wire: list[tuple[str, AnyMessage]] = []
        self.names = (f"t{i}" for i in itertools.count())
        self.free = set(range(NUM_BLOCKS))
        self.held: dict[str, tuple[int, ...]] = {}
        self.grants: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.granted_epoch: dict[str, int] = {}
        self.submitted_by: dict[tuple[int, str], list[int]] = {}
        """What each start of P submitted to a transfer."""
        self.ended_d: dict[str, str] = {}
        self.failed_d: set[str] = set()
        self.expected: set[str] = set()
        self.ended_p: set[str] = set()
        self.submitted: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self.is_frozen = False
        self.p_epoch = 0
        self.num_parts = 1
        transport = SimulatedTransport(self.memory["d"], self.network, self.check_landing)
        self.d = TransferReceiver(
            worker_id="d",
            epoch=1,
            fingerprint="f",
            transport=transport,
            send=lambda peer, message: self.send("p", message),
            layout=LAYOUT,
            lease_s=LEASE_S,
            clock=lambda: self.now_s,
        )
        self.d_transport = transport
        self.restart_p()

    # ------------------------------------------------------------------ world

    def restart_p(self) -> None:
        self.p_epoch += 1
        self.num_parts = 1 + self.p_epoch % 2
        self.expected.clear()
        self.ended_p.clear()
        self.submitted.clear()
        self.finished.clear()
        self.is_frozen = False
        self.p = TransferSender(
            worker_id="p",
            epoch=self.p_epoch,
            fingerprint="f",
            transport=SimulatedTransport(self.memory["p"], self.network),
            send=lambda peer, message: self.send("d", message),
            layout=LAYOUT,
            num_parts=self.num_parts,
            lease_s=LEASE_S,
            clock=lambda: self.now_s,
        )

    def send(self, target: str, message: AnyMessage) -> bool:
        self.wire.append((target, codec.decode(codec.encode(message))))
        return True

    def check_landing(self, write: SimulatedWrite, remote: int) -> None:
        header = codec.decode(write.header)
        transfer_id = header.transfer_id  # type: ignore[union-attr]
        assert remote in self.held.get(transfer_id, ()), f"{transfer_id} wrote a block given back"

    def hand_over(self, target: str, message: AnyMessage) -> None:
        if target == "d":
            self.d.on_message("p", message)  # type: ignore[arg-type]
        elif not self.is_frozen:
            self.p.on_message("d", message)  # type: ignore[arg-type]

    def take_back(self, transfer_id: str, how: str) -> None:
        assert transfer_id not in self.ended_d, "ended twice"
        self.ended_d[transfer_id] = how
        blocks = set(self.held.pop(transfer_id))
        assert blocks.isdisjoint(self.free), "released twice"
        self.free |= blocks

    # ------------------------------------------------------------------ rules

    @rule(
        count=st.integers(0, 5),
        first_index=st.integers(0, 2),
        asked=st.sampled_from(["before", "before", "before", "later"]),
        share=st.sampled_from([0, 1, 2, 9, 9]),
        pick=PICK,
    )
    def open(self, count: int, first_index: int, asked: str, share: int, pick: int) -> None:
        """A new hand-off, with part or all of it computed already."""
        blocks = tuple(sorted(self.free)[: min(count, len(self.free))])
        transfer_id = next(self.names)
        self.free -= set(blocks)
        self.held[transfer_id] = blocks
        self.grants[transfer_id] = (first_index, blocks)
        self.granted_epoch[transfer_id] = self.p_epoch
        if asked == "before" and not self.is_frozen:
            self.expect(transfer_id)
            self.submit_to(transfer_id, share, pick)
        sender = PeerRef(worker_id="p", epoch=self.p_epoch, endpoint="e")
        self.d.open(transfer_id, sender, blocks, first_index)

    def expect(self, transfer_id: str) -> None:
        self.p.expect(transfer_id, "d", 30)
        self.expected.add(transfer_id)
        self.submitted[transfer_id] = []
        self.submitted_by[self.p_epoch, transfer_id] = self.submitted[transfer_id]

    def submit_to(self, transfer_id: str, count: int, pick: int) -> None:
        first_index, blocks = self.grants[transfer_id]
        start = len(self.submitted[transfer_id])
        stop = min(start + count, first_index + len(blocks))
        local = [(pick + i) % NUM_BLOCKS for i in range(start, stop)]
        self.submitted[transfer_id] += local
        if self.num_parts == 2 and pick % 2:
            for part in (pick // 2 % 2, 1 - pick // 2 % 2):
                self.p.submit(transfer_id, start, local, part)
        else:
            self.p.submit(transfer_id, start, local)

    @precondition(lambda self: not self.is_frozen)
    @rule(pick=PICK)
    def expect_late(self, pick: int) -> None:
        waiting = [t for t in self.grants if t not in self.expected]
        if waiting:
            self.expect(waiting[pick % len(waiting)])

    @precondition(lambda self: not self.is_frozen)
    @rule(pick=PICK, count=st.integers(1, 9), then=st.sampled_from(["go on", "end", "end", "stop"]))
    def compute(self, pick: int, count: int, then: str) -> None:
        """Submit more; end the transfer, or stop at the first token."""
        open_ids = [t for t in self.grants if t in self.expected - self.finished]
        if not open_ids:
            return
        transfer_id = open_ids[pick % len(open_ids)]
        self.submit_to(transfer_id, count, pick)
        if then != "go on":
            self.finished.add(transfer_id)
            self.p.finish(transfer_id, first_token_id=1, finished=then == "stop")

    @rule(pick=PICK, how=st.sampled_from(["move", "move", "move", "copy", "drop"]))
    def deliver(self, pick: int, how: str) -> None:
        if self.wire:
            index = pick % min(len(self.wire), 4)
            target, message = self.wire[index] if how == "copy" else self.wire.pop(index)
            if how != "drop":
                self.hand_over(target, message)

    @rule(has_p=st.booleans(), has_d=st.booleans())
    def turn(self, has_p: bool, has_d: bool) -> None:
        """One turn of the control loops: everything on the wire, then the polls."""
        while self.wire:
            self.hand_over(*self.wire.pop(0))
        if has_p and not self.is_frozen:
            self.poll_p()
        if has_d:
            self.poll_d()

    @rule(pick=PICK, count=st.integers(1, 3))
    def land(self, pick: int, count: int) -> None:
        for _ in range(count):
            if self.network.on_the_way:
                ways = self.network.on_the_way
                ways.pop(pick % len(ways)).land()

    @rule(seconds=st.sampled_from([0.01, 0.01, 0.2, 1.0, 4.0, 11.0]))
    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(
        pick=PICK,
        fault=st.sampled_from(FAULTS),
    )
    def fault(self, pick: int, fault: str) -> None:
        arrivals, ids = self.d_transport.arrivals, list(self.grants)
        if fault == "cancel by d" and ids:
            self.d.cancel(ids[pick % len(ids)])
        elif fault == "cancel by p" and ids and not self.is_frozen:
            self.p.cancel(ids[pick % len(ids)], "aborted", "")
        elif fault == "repeat header" and arrivals:
            arrivals.append(arrivals[pick % len(arrivals)])
        elif fault == "lose header" and arrivals:
            arrivals.pop(pick % len(arrivals))
        elif fault == "corrupt" and self.network.on_the_way:
            write = self.network.on_the_way[pick % len(self.network.on_the_way)]
            write.pairs[-1] = (b"corrupt!"[: write.size.num_bytes], write.pairs[-1][1])
        elif fault in ("freeze", "wake"):
            self.is_frozen = fault == "freeze"
        elif fault == "link falls":
            self.wire.clear()
            self.d.on_peer_down("p")
            if not self.is_frozen:
                self.p.on_peer_down("d")
        elif fault.endswith("restart"):  # the old process's writes are still on their way
            self.wire.clear()
            if fault == "restart":
                self.d.on_peer_down("p")
            self.restart_p()

    def poll_d(self) -> None:
        for event in self.d.poll():
            if isinstance(event, Committed):
                assert event.transfer_id not in self.failed_d
                self.check_committed(event)
                self.take_back(event.transfer_id, "committed")
            elif isinstance(event, ReceiveFailed):
                assert event.transfer_id not in self.failed_d, "failed twice"
                assert event.transfer_id not in self.ended_d
                self.failed_d.add(event.transfer_id)
            elif isinstance(event, BlocksReleased):
                assert event.block_ids == self.held[event.transfer_id]
                self.take_back(event.transfer_id, "released")

    def poll_p(self) -> None:
        for event in self.p.poll():
            assert event.transfer_id in self.expected
            assert event.transfer_id not in self.ended_p, "ended twice"
            self.ended_p.add(event.transfer_id)

    def check_committed(self, event: Committed) -> None:
        if event.done.finished:
            return
        first_index, blocks = self.grants[event.transfer_id]
        granted = self.granted_epoch[event.transfer_id], event.transfer_id
        local = self.submitted_by[granted][first_index:]
        got = [bytes(self.memory["d"].block(b)) for b in blocks]
        assert got == [bytes(self.memory["p"].block(b)) for b in local]

    # ------------------------------------------------------------------ checks

    @invariant()
    def blocks_add_up(self) -> None:
        in_held = [block for blocks in self.held.values() for block in blocks]
        assert len(in_held) + len(self.free) == NUM_BLOCKS
        assert self.d.num_quarantined_blocks <= len(in_held)

    def teardown(self) -> None:
        self.is_frozen = False
        for transfer_id in self.expected - self.finished:
            self.p.cancel(transfer_id, "aborted", "the test is over")
        for _ in range(200):
            self.turn(True, True)
            if self.network.on_the_way and self.now_s % 3 > 1:
                self.network.on_the_way.pop(0).land()
            self.now_s += 0.5
        assert self.d.num_open == self.d.num_quarantined_blocks == 0
        assert self.p.num_open == 0
        assert not self.held
        assert self.ended_p == self.expected
        for write in self.network.on_the_way:
            write.land()  # later than everything: nothing may be hit


TestTransferMachine = TransferMachine.TestCase
TestTransferMachine.settings = settings(
    max_examples=int(os.environ.get("PDMESH_RANDOM_ORDERS", "300")),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
