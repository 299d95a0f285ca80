"""The listening half of the TCP data plane: one inlet per accepted connection."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Collection
from enum import Enum, auto

from kvtransfer.pool import BlockMemory
from kvtransfer.tcp_frame import GREETING, MAGIC, PREFIX, RECEIPT, TCP_VERSION, unpack_block_ids
from kvtransfer.transitions import TransitionTable
from kvtransfer.transport import MAX_CHUNK_BLOCKS, MAX_HEADER_BYTES, Arrival

logger = logging.getLogger(__name__)


class TcpEndpoint:
    """What one sender may write to."""

    def __init__(self, peer_id: str, token: bytes) -> None:
        self.peer_id = peer_id
        self.token = token
        self.permitted: set[int] = set()
        self.inlets: set[TcpInlet] = set()


class _Part(Enum):
    GREETING = auto()
    PREFIX = auto()
    HEAD = auto()
    BLOCKS = auto()


class _Read(Enum):
    WHOLE = auto()


_PARTS: TransitionTable[_Part, _Read] = TransitionTable(
    {
        (_Part.GREETING, _Read.WHOLE): _Part.PREFIX,
        (_Part.PREFIX, _Read.WHOLE): _Part.HEAD,
        (_Part.HEAD, _Read.WHOLE): _Part.BLOCKS,
        (_Part.BLOCKS, _Read.WHOLE): _Part.PREFIX,
    }
)


class _Refused(Exception):
    """The dialer broke the frame format or wrote outside its grants."""


class TcpInlet:
    """Reads one connection part by part, each part into exactly its own memory."""

    def __init__(
        self,
        accepted: socket.socket,
        memory: BlockMemory,
        find_endpoint: Callable[[bytes], TcpEndpoint | None],
    ) -> None:
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = accepted
        self.is_closed = False
        self._memory = memory
        self._find_endpoint = find_endpoint
        self._endpoint: TcpEndpoint | None = None
        self._part = _Part.GREETING
        self._target = memoryview(bytearray(GREETING.size))
        self._filled = 0
        self._header_len = 0
        self._num_blocks = 0
        self._header = b""
        self._block_ids: tuple[int, ...] = ()
        self._next_block = 0
        self._num_frames = 0
        self._receipt = b""

    def receive(self, arrivals: list[Arrival], budget: int) -> int:
        """Read about ``budget`` bytes at most; sets ``is_closed`` at the end or a refusal."""
        received = 0
        try:
            self._send_receipt()
            while received < budget:
                size = self.socket.recv_into(self._target[self._filled :])
                if size == 0:
                    self.is_closed = True
                    break
                received += size
                self._filled += size
                if self._filled == len(self._target):
                    self._on_whole_target(arrivals)
        except BlockingIOError:
            pass
        except _Refused as refusal:
            logger.warning("tcp data connection refused: %s", refusal)
            self.is_closed = True
        except OSError:
            self.is_closed = True
        return received

    def is_writing(self, block_ids: Collection[int]) -> bool:
        """Whether the frame being read goes to one of these blocks."""
        return self._part is _Part.BLOCKS and not set(self._block_ids).isdisjoint(block_ids)

    def close(self) -> None:
        """Close the socket: not one more byte reaches the pool through it."""
        self.is_closed = True
        self.socket.close()
        if self._endpoint is not None:
            self._endpoint.inlets.discard(self)

    def _on_whole_target(self, arrivals: list[Arrival]) -> None:
        if self._part is _Part.GREETING:
            self._on_greeting()
        elif self._part is _Part.PREFIX:
            self._on_prefix()
        elif self._part is _Part.HEAD:
            self._on_head()
        else:
            self._on_block(arrivals)

    def _on_greeting(self) -> None:
        magic, version, token = GREETING.unpack(self._target)
        if magic != MAGIC or version != TCP_VERSION:
            raise _Refused("not a KV connection of this version")
        self._endpoint = self._find_endpoint(token)
        if self._endpoint is None:
            raise _Refused("unknown or fenced endpoint")
        self._endpoint.inlets.add(self)
        self._expect(memoryview(bytearray(PREFIX.size)))

    def _on_prefix(self) -> None:
        self._header_len, self._num_blocks = PREFIX.unpack(self._target)
        if self._header_len > MAX_HEADER_BYTES or not 0 < self._num_blocks <= MAX_CHUNK_BLOCKS:
            raise _Refused("a frame's sizes are out of range")
        self._expect(memoryview(bytearray(self._header_len + 4 * self._num_blocks)))

    def _on_head(self) -> None:
        assert self._endpoint is not None
        self._header = bytes(self._target[: self._header_len])
        self._block_ids = unpack_block_ids(self._target[self._header_len :])
        block_ids = set(self._block_ids)
        if len(block_ids) != self._num_blocks or not block_ids <= self._endpoint.permitted:
            raise _Refused("a block is not under a grant of this peer")
        # Each granted block may be written once.
        self._endpoint.permitted -= block_ids
        self._next_block = 0
        self._expect(self._memory.block(self._block_ids[0]))

    def _on_block(self, arrivals: list[Arrival]) -> None:
        assert self._endpoint is not None
        self._next_block += 1
        if self._next_block < self._num_blocks:
            self._target, self._filled = self._memory.block(self._block_ids[self._next_block]), 0
            return
        arrivals.append(Arrival(self._endpoint.peer_id, self._header))
        self._num_frames += 1
        self._receipt = RECEIPT.pack(self._num_frames)  # cumulative: an unsent one is superseded
        self._send_receipt()
        self._expect(memoryview(bytearray(PREFIX.size)))

    def _expect(self, target: memoryview) -> None:
        self._part = _PARTS.next(self._part, _Read.WHOLE)
        self._target, self._filled = target, 0

    def _send_receipt(self) -> None:
        if not self._receipt:
            return
        try:
            sent = self.socket.send(self._receipt)
        except BlockingIOError:
            return
        if sent != len(self._receipt):
            raise _Refused("a receipt did not fit the socket buffer")
        self._receipt = b""
