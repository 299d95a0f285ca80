"""The sending process of the transfer benchmark: ``python -m benchmarks.transfer_peer``.

Started by ``benchmarks.transfer`` with one end of a socket pair. Idle, it sleeps in it.
"""

from __future__ import annotations

import json
import select
import socket
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvtransfer.events import SendDone, SendFailed
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.sender.sender import TransferSender
from kvtransfer.transports.factory import make_transport
from kvtransfer.transports.ucx.agent import NixlAgent
from kvtransfer.transports.ucx.library import load_nixl
from mesh import codec
from mesh.errors import PdmeshError

SENDER, RECEIVER, FINGERPRINT = "p", "d", "bench"
COMMAND = b"{"
"""A command is JSON and begins so; a message is a MessagePack array."""


def content(block_id: int, block_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What the sender's block holds."""
    return np.random.default_rng(block_id).integers(0, 256, block_bytes, np.uint8)


def main() -> None:
    """Serve until the other end of the socket pair is closed."""
    descriptor, method, num_blocks, block_bytes = sys.argv[1:5]
    wire = Connection(int(descriptor))
    memory = BlockMemory.allocate(int(num_blocks), int(block_bytes))
    for block_id in range(memory.num_blocks):
        memory.block(block_id)[:] = content(block_id, memory.block_bytes).data
    serve = {"raw TCP": _raw_tcp, "NIXL": _nixl}.get(method, _pdmesh)
    wire.send_bytes(b"{}")
    try:
        serve(wire, memory, method)
    except EOFError:
        return


def wait_for(wire: Connection, fileno: int | None, *, busy: bool) -> bool:
    """Sleep until there is something to do, as a worker does; True where it is on the wire.

    A transport without a file to wait for is polled at once.
    """
    if not busy:
        return wire.poll(None)
    if fileno is None:
        return wire.poll(0)
    readable, _, _ = select.select([wire.fileno(), fileno], [], [], 0.001)
    return wire.fileno() in readable


def _command(wire: Connection) -> dict[str, Any]:
    command: dict[str, Any] = json.loads(wire.recv_bytes())
    return command


def _raw_tcp(wire: Connection, memory: BlockMemory, method: str) -> None:
    with socket.create_connection(("127.0.0.1", _command(wire)["port"])) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            for block_id in _command(wire)["from"]:
                connection.sendall(memory.block(block_id))


def _nixl(wire: Connection, memory: BlockMemory, method: str) -> None:
    agent = NixlAgent(load_nixl(), "bench-p", memory, memory.address)
    target = _command(wire)
    handle = agent.handle
    remote = handle.add_remote_agent(bytes.fromhex(target["metadata"]))
    size = memory.block_bytes
    lists = [
        handle.prep_xfer_dlist(
            owner, np.array([[base, size, 0, size, memory.num_blocks]], np.uint64), "DRAM"
        )
        for owner, base in (("NIXL_INIT_AGENT", memory.address), (remote, target["address"]))
    ]
    while True:
        command = _command(wire)
        write = handle.make_prepped_xfer(
            "WRITE", lists[0], np.array(command["from"], np.int32),
            lists[1], np.array(command["to"], np.int32), b"done",
        )  # fmt: skip
        state = handle.transfer(write)
        while state == "PROC":
            state = handle.check_xfer_state(write)
        if state != "DONE":
            raise RuntimeError(f"the NIXL write ended as {state}")
        handle.release_xfer_handle(write)


def _pdmesh(wire: Connection, memory: BlockMemory, method: str) -> None:
    transport = make_transport(method, memory, SENDER, 1)

    def send(peer_id: str, message: Any) -> bool:
        wire.send_bytes(codec.encode(message))
        return True

    sender = TransferSender(
        worker_id=SENDER, epoch=1, fingerprint=FINGERPRINT, transport=transport, send=send
    )
    try:
        while True:
            if wait_for(wire, transport.connections_fileno(), busy=sender.num_open > 0):
                data = wire.recv_bytes()
                if data.startswith(COMMAND):
                    command = json.loads(data)
                    transfer_id = command["transfer_id"]
                    sender.expect(transfer_id, RECEIVER, 60.0)
                    sender.submit(transfer_id, 0, command["from"])
                    sender.finish(transfer_id, first_token_id=0, finished=False)
                    wire.send_bytes(b"{}")
                else:
                    message: Any = codec.decode(data)
                    sender.on_message(RECEIVER, message)
            for event in sender.poll():
                if isinstance(event, SendFailed):
                    raise PdmeshError(f"{event.code}: {event.message}")
                assert isinstance(event, SendDone)
    finally:
        transport.close()


if __name__ == "__main__":
    main()
