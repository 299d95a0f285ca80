"""A prefill worker's transfer side as a process of its own, for tests that kill or freeze it.

Speaks length-prefixed ``mesh.codec`` messages on stdin and stdout. It expects every granted
transfer and fills the granted blocks from its own pool, whose bytes all are ``PATTERN``. With
``raw`` it writes every granted block in a single call instead, bypassing chunking, so that a stop
signal hits inside the transport.
"""

from __future__ import annotations

import os
import struct
import sys

import numpy as np

from kvtransfer.memory.pool import BlockMemory
from kvtransfer.sender.sender import TransferSender
from kvtransfer.transports.factory import make_transport
from mesh import codec
from mesh.messages import AnyMessage, Grant
from tests.conformance.cluster import FINGERPRINT

PATTERN = 0x5A
LENGTH = struct.Struct("<I")


def pack(message: AnyMessage) -> bytes:
    """One message as it goes through the pipe."""
    data = codec.encode(message)
    return LENGTH.pack(len(data)) + data


class MessagePipe:
    """Reads whole messages from a non-blocking file descriptor."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._data = bytearray()

    def read(self) -> list[AnyMessage]:
        """Messages that are there now; EOFError when the other end is gone."""
        try:
            data = os.read(self._descriptor, 1 << 20)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        self._data += data
        messages = []
        while len(self._data) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._data)
            if len(self._data) < LENGTH.size + length:
                break
            messages.append(codec.decode(bytes(self._data[LENGTH.size : LENGTH.size + length])))
            del self._data[: LENGTH.size + length]
        return messages


def main(transport_name: str, num_blocks: int, block_bytes: int, mode: str) -> None:
    memory = BlockMemory.allocate(num_blocks, block_bytes)
    np.frombuffer(memory.buffer, np.uint8)[:] = PATTERN
    transport = make_transport(transport_name, memory, "p", 1)

    def send(peer_id: str, message: AnyMessage) -> bool:
        os.write(1, pack(message))
        return True

    sender = TransferSender(
        worker_id="p", epoch=1, fingerprint=FINGERPRINT, transport=transport, send=send
    )
    pipe = MessagePipe(0)
    os.write(2, b"ready\n")
    while True:
        try:
            messages = pipe.read()
        except EOFError:
            break
        for message in messages:
            if isinstance(message, Grant):
                blocks = list(range(len(message.block_ids)))
                if mode == "raw":
                    connection = transport.connect("d", message.address)
                    # Small first: the way must be set up before the call that is interrupted.
                    for part in (blocks[:1], blocks[1:]):
                        ids = [message.block_ids[b] for b in part]
                        write = connection.write(part, ids, b"raw", memory.whole)
                        while not write.poll():
                            pass
                    continue
                sender.expect(message.transfer_id, "d", 60)
                sender.submit(message.transfer_id, 0, blocks)
                sender.finish(message.transfer_id, first_token_id=1, finished=False)
            sender.on_message("d", message)  # type: ignore[arg-type]
        sender.poll()
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
