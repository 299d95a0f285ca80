"""A sender that tears its connection down under a write can't promise quiet blocks."""

from __future__ import annotations

from kvtransfer.errors import WRITE_ABORTED
from kvtransfer.events import BlocksReleased, ReceiveFailed
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.receiver.receiver import TransferReceiver
from kvtransfer.sender.sender import TransferSender
from mesh.messages import PeerRef, TransferNack
from tests.unit.kvtransfer.simulated_transport import SimulatedNetwork, SimulatedTransport


class Pair:
    """One sender and one receiver with a clock and two message queues."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.network = SimulatedNetwork()
        self.to_p: list[object] = []
        self.to_d: list[object] = []
        self.memory = {
            side: BlockMemory(bytearray(64), num_blocks=8, block_bytes=8) for side in "pd"
        }
        self.p = TransferSender(
            worker_id="p",
            epoch=1,
            fingerprint="f",
            transport=SimulatedTransport(self.memory["p"], self.network),
            send=lambda peer, message: self.to_d.append(message) is None,
            lease_s=10,
            clock=lambda: self.now_s,
        )
        self.d = TransferReceiver(
            worker_id="d",
            epoch=1,
            fingerprint="f",
            transport=SimulatedTransport(self.memory["d"], self.network),
            send=lambda peer, message: self.to_p.append(message) is None,
            lease_s=10,
            clock=lambda: self.now_s,
        )

    def deliver_to_p(self) -> None:
        while self.to_p:
            self.p.on_message("d", self.to_p.pop(0))  # type: ignore[arg-type]

    def deliver_to_d(self) -> None:
        while self.to_d:
            self.d.on_message("p", self.to_d.pop(0))  # type: ignore[arg-type]


def test_write_aborted_fences_the_sender() -> None:
    pair = Pair()
    pair.p.expect("t", "d", 60)
    pair.d.open("t", PeerRef(worker_id="p", epoch=1, endpoint="e"), [3, 4], 0)
    pair.deliver_to_p()
    pair.memory["p"].block(0)[:] = b"late one"
    pair.p.submit("t", 0, [0, 1])
    pair.p.poll()
    pair.p.cancel("t", "aborted", "the client left")
    pair.now_s = 5
    pair.to_d.clear()
    pair.deliver_to_p()
    pair.now_s = 9.9
    pair.d.on_message("p", _renewal())
    pair.now_s = 11  # the write did not end within the lease: torn down
    (event,) = pair.p.poll()
    assert event.transfer_id == "t"
    nack = pair.to_d[-1]
    assert isinstance(nack, TransferNack)
    assert nack.code == WRITE_ABORTED
    pair.deliver_to_d()
    assert pair.d.num_fences == 1
    assert [type(e) for e in pair.d.poll()] == [ReceiveFailed]
    assert pair.d.num_quarantined_blocks == 2
    pair.network.on_the_way[0].land()
    assert bytes(pair.memory["d"].block(3)) == bytes(8)
    pair.now_s += 1
    assert pair.d.poll() == [BlocksReleased("t", (3, 4))]


def _renewal() -> object:
    from mesh.messages import LeaseRenew

    return LeaseRenew(transfer_ids=("t",))
