"""A decode worker's transfer side as a process of its own: grants its whole pool, then polls."""

from __future__ import annotations

import os
import sys

import numpy as np

from kvtransfer.memory.pool import BlockMemory
from kvtransfer.receiver.receiver import TransferReceiver
from kvtransfer.transports.factory import make_transport
from mesh.messages import AnyMessage, PeerRef
from tests.conformance.cluster import FINGERPRINT
from tests.conformance.sender_process import pack


def main(transport_name: str, num_blocks: int, block_bytes: int) -> None:
    memory = BlockMemory.allocate(num_blocks, block_bytes)
    np.frombuffer(memory.buffer, np.uint8)[:] = 0
    transport = make_transport(transport_name, memory, "d", 1)

    def send(peer_id: str, message: AnyMessage) -> bool:
        os.write(1, pack(message))
        return True

    receiver = TransferReceiver(
        worker_id="d", epoch=1, fingerprint=FINGERPRINT, transport=transport, send=send
    )
    sender = PeerRef(worker_id="p", epoch=1, endpoint="pipe")
    receiver.open("t", sender, list(range(num_blocks)), 0)
    while os.getppid() != 1:
        receiver.poll()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
