"""Moving KV blocks between two processes: the whole path beside what it is made of.

For each number of scattered blocks, in turns within one run:

    memcpy    the same blocks copied inside one process
    raw TCP   the same bytes through one loopback socket, received into the blocks
    NIXL      one write of the same block lists between two bare agents, with its notification
    shm, ucx, tcp   the whole path: grant, writes, checksums, commit (the KV is computed already)
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.table import format_table, machine, write_json
from benchmarks.transfer_peer import (
    COMMAND,
    FINGERPRINT,
    RECEIVER,
    SENDER,
    content,
    wait_for,
)
from kvtransfer.events import Committed
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.receiver.receiver import TransferReceiver
from kvtransfer.transports.factory import make_transport
from kvtransfer.transports.ucx.agent import NixlAgent
from kvtransfer.transports.ucx.library import load_nixl
from mesh import codec
from mesh.errors import PdmeshError
from mesh.messages import PeerRef

_METHODS = ("memcpy", "raw TCP", "NIXL", "shm", "ucx", "tcp")
_HEADINGS = (
    "blocks", "MiB", *(f"{method} GB/s" for method in _METHODS),
    "shm / memcpy", "shm / NIXL", "ucx / NIXL", "tcp / raw TCP", "shm - memcpy ms",
)  # fmt: skip
_ROOT = Path(__file__).resolve().parents[1]
_TIMEOUT_S = 60.0


def main(argv: SequenceOf[str]) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="pdmesh bench transfer", description=__doc__)
    add = parser.add_argument
    add("--blocks", default="1,4,16,64,256", help="blocks a transfer (default: 1,4,16,64,256)")
    add(
        "--block-bytes", type=int, default=368_640,
        help="bytes of a block (default: 368640, the packaged model's 16 tokens in fp16)",
    )  # fmt: skip
    add("--repeat", type=int, default=30, help="transfers of each kind and size (default: 30)")
    add("--json", default="", metavar="FILE", help="write every time there")
    options = parser.parse_args(argv)
    counts = [int(count) for count in options.blocks.split(",")]
    num_blocks = 2 * max(counts)
    print(machine() + "\n")
    times: dict[int, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        methods = {
            method: stack.enter_context(
                closing(_RECEIVERS[method](method, num_blocks, options.block_bytes))
            )
            for method in _METHODS
        }
        for count in counts:
            of_count = times[count] = {method: [] for method in _METHODS}
            for number in range(-2, options.repeat):  # the first ones touch pages and connect
                source = random.sample(range(num_blocks), count)
                target = random.sample(range(num_blocks), count)
                for method, receiver in methods.items():
                    seconds = receiver.transfer(source, target)
                    if number < 0:
                        receiver.check(source, target)
                    else:
                        of_count[method].append(seconds)
    rows = [_row(count, options.block_bytes, of_count) for count, of_count in times.items()]
    print(format_table(_HEADINGS, rows))
    print("\nmedians; the last column is what a hand-off takes longer than copying")
    if options.json:
        write_json(options.json, {"machine": machine(), "options": vars(options), "s": times})
    return 0


def _row(count: int, block_bytes: int, of_count: dict[str, list[float]]) -> list[object]:
    seconds = {method: statistics.median(of_method) for method, of_method in of_count.items()}
    size = count * block_bytes
    return [
        count, size / 2**20, *(size / seconds[method] / 1e9 for method in _METHODS),
        seconds["memcpy"] / seconds["shm"], seconds["NIXL"] / seconds["shm"],
        seconds["NIXL"] / seconds["ucx"], seconds["raw TCP"] / seconds["tcp"],
        (seconds["shm"] - seconds["memcpy"]) * 1e3,
    ]  # fmt: skip


def _touched(num_blocks: int, block_bytes: int) -> BlockMemory:
    """A pool whose pages are all there, as in a worker that has served for a while."""
    memory = BlockMemory.allocate(num_blocks, block_bytes)
    memory.buffer[:] = b"\xee" * memory.num_bytes
    return memory


class _Receiver(ABC):
    """The side that waits for the bytes; holds the sending process."""

    def __init__(self, method: str, num_blocks: int, block_bytes: int) -> None:
        self.memory = _touched(num_blocks, block_bytes)
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "benchmarks.transfer_peer", str(theirs.fileno()),
                method, str(num_blocks), str(block_bytes),
            ],
            pass_fds=[theirs.fileno()], cwd=_ROOT, process_group=0,
        )  # fmt: skip
        theirs.close()
        self.wire = Connection(ours.detach())
        self._answer()

    def close(self) -> None:
        """End the sending process."""
        self.wire.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @abstractmethod
    def transfer(self, source: list[int], target: list[int]) -> float:
        """Seconds until the sender's blocks ``source`` are in ``target`` here."""

    def check(self, source: list[int], target: list[int]) -> None:
        """Raise unless every byte is what the sender holds."""
        for there, here in zip(source, target, strict=True):
            if bytes(self.memory.block(here)) != content(there, self.memory.block_bytes).tobytes():
                raise PdmeshError(f"{type(self).__name__}: block {there} arrived changed")

    def _say(self, **command: Any) -> None:
        self.wire.send_bytes(json.dumps(command).encode())

    def _answer(self) -> None:
        if not self.wire.poll(_TIMEOUT_S):
            raise PdmeshError("the sending process does not answer")
        self.wire.recv_bytes()


class Memcpy(_Receiver):
    """No process: the sender's blocks lie here too."""

    def __init__(self, method: str, num_blocks: int, block_bytes: int) -> None:
        self.memory = _touched(num_blocks, block_bytes)
        self._sent = BlockMemory.allocate(num_blocks, block_bytes)
        for block_id in range(num_blocks):
            self._sent.block(block_id)[:] = content(block_id, block_bytes).data

    def close(self) -> None:
        pass

    def transfer(self, source: list[int], target: list[int]) -> float:
        start_s = time.perf_counter()
        for there, here in zip(source, target, strict=True):
            self.memory.block(here)[:] = self._sent.block(there)
        return time.perf_counter() - start_s


class _RawTcp(_Receiver):
    def __init__(self, method: str, num_blocks: int, block_bytes: int) -> None:
        super().__init__(method, num_blocks, block_bytes)
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._say(port=server.getsockname()[1])
            self._socket = server.accept()[0]

    def transfer(self, source: list[int], target: list[int]) -> float:
        start_s = time.perf_counter()
        self._say(**{"from": source})
        for here in target:
            view = self.memory.block(here)
            while view:
                view = view[self._socket.recv_into(view) :]
        return time.perf_counter() - start_s

    def close(self) -> None:
        self._socket.close()
        super().close()


class _Nixl(_Receiver):
    def __init__(self, method: str, num_blocks: int, block_bytes: int) -> None:
        super().__init__(method, num_blocks, block_bytes)
        self._agent = NixlAgent(load_nixl(), "bench-d", self.memory, self.memory.address)
        metadata = bytes(self._agent.handle.get_agent_metadata())
        self._say(metadata=metadata.hex(), address=self.memory.address)

    def transfer(self, source: list[int], target: list[int]) -> float:
        start_s = time.perf_counter()
        self._say(**{"from": source, "to": target})
        while not self._agent.handle.get_new_notifs():
            if time.perf_counter() - start_s > _TIMEOUT_S:
                raise PdmeshError("no notification came")
        return time.perf_counter() - start_s

    def close(self) -> None:
        super().close()
        self._agent.destroy()


class _Pdmesh(_Receiver):
    def __init__(self, method: str, num_blocks: int, block_bytes: int) -> None:
        super().__init__(method, num_blocks, block_bytes)
        self._transport = make_transport(method, self.memory, RECEIVER, 1)
        self._receiver = TransferReceiver(
            worker_id=RECEIVER, epoch=1, fingerprint=FINGERPRINT,
            transport=self._transport, send=self._send,
        )  # fmt: skip
        self._sender = PeerRef(worker_id=SENDER, epoch=1, endpoint="tcp://127.0.0.1:1")
        self._num_transfers = 0

    def _answer(self) -> None:
        while self.wire.poll(_TIMEOUT_S):
            data = self.wire.recv_bytes()
            if data.startswith(COMMAND):
                return
            # A renewed lease, or a last word said again.
            message: Any = codec.decode(data)
            self._receiver.on_message(SENDER, message)
        raise PdmeshError("the sending process does not answer")

    def transfer(self, source: list[int], target: list[int]) -> float:
        self._num_transfers += 1
        name = f"t{self._num_transfers}"
        self._say(**{"transfer_id": name, "from": source})
        self._answer()
        start_s = time.perf_counter()
        self._receiver.open(name, self._sender, target, 0)
        while True:
            if wait_for(self.wire, self._transport.arrivals_fileno(), busy=True):
                message: Any = codec.decode(self.wire.recv_bytes())
                self._receiver.on_message(SENDER, message)
            for event in self._receiver.poll():
                if not isinstance(event, Committed):
                    raise PdmeshError(f"the transfer failed: {event}")
                return time.perf_counter() - start_s

    def close(self) -> None:
        self._transport.close()
        super().close()

    def _send(self, peer_id: str, message: Any) -> bool:
        self.wire.send_bytes(codec.encode(message))
        return True


_RECEIVERS: dict[str, type[_Receiver]] = {
    "memcpy": Memcpy, "raw TCP": _RawTcp, "NIXL": _Nixl,
    "shm": _Pdmesh, "ucx": _Pdmesh, "tcp": _Pdmesh,
}  # fmt: skip
