"""The listening end of one accepted data connection: reads frames, checks them, sends receipts."""

from __future__ import annotations

import logging
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from enum import Enum, auto

from kvtransfer.memory.pool import BlockMemory
from kvtransfer.memory.segments import SegmentSize
from kvtransfer.transports.base import MAX_CHUNK_SEGMENTS, MAX_HEADER_BYTES
from kvtransfer.transports.socket.frame import (
    FRAME_VERSION,
    GREETING,
    MAGIC,
    PREFIX,
    RECEIPT,
    unpack_ids,
)
from kvtransfer.transports.write_grants import WriteGrants
from mesh.transitions import TransitionTable

logger = logging.getLogger(__name__)

_MAX_IOVECS = 64


Digests = Future[list[int]] | list[int] | None
"""xxh3-64 of a frame's segments: to come, there, or left to the receiver."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One write that was read whole."""

    peer_id: str
    header: bytes
    digests: Digests


class Endpoint:
    """What one sender may write to."""

    def __init__(self, peer_id: str, token: bytes, block_bytes: int) -> None:
        self.peer_id = peer_id
        self.token = token
        self.write_grants = WriteGrants(block_bytes)
        self.connections: set[ReceiveConnection] = set()


class _Part(Enum):
    GREETING = auto()
    PREFIX = auto()
    HEAD = auto()
    BODY = auto()


class _Read(Enum):
    WHOLE = auto()


_PARTS: TransitionTable[_Part, _Read] = TransitionTable(
    {
        (_Part.GREETING, _Read.WHOLE): _Part.PREFIX,
        (_Part.PREFIX, _Read.WHOLE): _Part.HEAD,
        (_Part.HEAD, _Read.WHOLE): _Part.BODY,
        (_Part.BODY, _Read.WHOLE): _Part.PREFIX,
    }
)


class Refused(Exception):
    """The dialer broke the frame format or wrote outside its grants."""


class ReceiveConnection(ABC):
    """Reads one connection part by part, each part into exactly its own memory."""

    num_id_lists: int
    """Lists of segment ids in a frame's head."""

    def __init__(
        self,
        accepted: socket.socket,
        memory: BlockMemory,
        find_endpoint: Callable[[bytes], Endpoint | None],
        helper: Executor,
    ) -> None:
        accepted.setblocking(False)
        self.socket = accepted
        self.is_closed = False
        self._memory = memory
        self._find_endpoint = find_endpoint
        self._helper = helper
        self._endpoint: Endpoint | None = None
        self._part = _Part.GREETING
        self._whole = memoryview(bytearray(GREETING.size))
        self._targets: deque[memoryview] = deque([self._whole])
        """What of the current part has not been read yet."""
        self._num_segments = 0
        self._size = SegmentSize(1, 1)
        self._header = b""
        self._ids: tuple[int, ...] = ()
        self._num_frames = 0
        self._receipt = b""

    def receive(self, frames: list[Frame], budget: int) -> int:
        """Take in at most one frame and about ``budget`` bytes: it is checked while it is hot.

        Sets ``is_closed`` at the end or a refusal.
        """
        received = 0
        try:
            self._send_receipt()
            num_frames = self._num_frames
            while received < budget and not self.is_closed and self._num_frames == num_frames:
                received += self._read()
                if not self._targets:
                    received += self._on_whole_part(frames)
        except BlockingIOError:
            pass
        except Refused as refusal:
            logger.warning("data connection refused: %s", refusal)
            self.is_closed = True
        except OSError:
            self.is_closed = True
        return received

    def is_writing(self, block_ids: Collection[int]) -> bool:
        """Whether the frame being read goes to one of these blocks."""
        if self._part is not _Part.BODY:
            return False
        stride, block_bytes = self._size.stride, self._memory.block_bytes
        return not {segment * stride // block_bytes for segment in self._ids}.isdisjoint(block_ids)

    def close(self) -> None:
        """Close the socket: not one more byte reaches the pool through it."""
        self.is_closed = True
        self.socket.close()
        if self._endpoint is not None:
            self._endpoint.connections.discard(self)

    def _body(self, ids: tuple[int, ...], size: SegmentSize) -> deque[memoryview]:
        """Where the frame's body is read to; the head's ids were checked. Default: it has none."""
        return deque()

    @abstractmethod
    def _take_in(
        self, ids: tuple[int, ...], sources: tuple[int, ...], size: SegmentSize
    ) -> tuple[int, Digests]:
        """The frame is read whole: see that its bytes are in the pool.

        Returns:
            Bytes moved here, and the segments' digests, now or later.

        Raises:
            Refused: they can't be had.
        """

    def _read(self) -> int:
        if len(self._targets) == 1:
            count = self.socket.recv_into(self._targets[0])
        else:
            parts = [self._targets[i] for i in range(min(_MAX_IOVECS, len(self._targets)))]
            count = self.socket.recvmsg_into(parts)[0]
        if count == 0:
            self.is_closed = True
        self._advance(count)
        return count

    def _advance(self, count: int) -> None:
        while count:
            head = self._targets[0]
            if count < len(head):
                self._targets[0] = head[count:]
                return
            count -= len(head)
            self._targets.popleft()

    def _on_whole_part(self, frames: list[Frame]) -> int:
        moved = 0
        if self._part is _Part.GREETING:
            self._on_greeting()
        elif self._part is _Part.PREFIX:
            self._on_prefix()
        elif self._part is _Part.HEAD:
            self._on_head()
        if self._part is _Part.BODY and not self._targets:
            moved = self._on_frame(frames)
        return moved

    def _on_greeting(self) -> None:
        magic, version, token = GREETING.unpack(self._whole)
        if magic != MAGIC or version != FRAME_VERSION:
            raise Refused("not a KV connection of this version")
        self._endpoint = self._find_endpoint(token)
        if self._endpoint is None:
            raise Refused("unknown or fenced endpoint")
        self._endpoint.connections.add(self)
        self._expect(PREFIX.size)

    def _on_prefix(self) -> None:
        header_len, self._num_segments, stride, num_bytes = PREFIX.unpack(self._whole)
        if header_len > MAX_HEADER_BYTES or not 0 < self._num_segments <= MAX_CHUNK_SEGMENTS:
            raise Refused("a frame's sizes are out of range")
        self._size = SegmentSize(stride, num_bytes)
        self._expect(header_len + 4 * self._num_segments * self.num_id_lists)

    def _on_head(self) -> None:
        assert self._endpoint is not None
        split = len(self._whole) - 4 * self._num_segments * self.num_id_lists
        self._header = bytes(self._whole[:split])
        self._ids = unpack_ids(self._whole[split : split + 4 * self._num_segments])
        if not self._endpoint.write_grants.take(self._ids, self._size):
            raise Refused("a segment is not under a grant of this peer, or was written before")
        self._part = _PARTS.next(self._part, _Read.WHOLE)
        self._targets = self._body(self._ids, self._size)

    def _on_frame(self, frames: list[Frame]) -> int:
        assert self._endpoint is not None
        sources = unpack_ids(self._whole[len(self._whole) - 4 * self._num_segments :])
        moved, digests = self._take_in(self._ids, sources, self._size)
        frames.append(Frame(self._endpoint.peer_id, self._header, digests))
        self._num_frames += 1
        self._receipt = RECEIPT.pack(self._num_frames)  # cumulative: an unsent one is superseded
        self._send_receipt()
        self._expect(PREFIX.size)
        return moved

    def _expect(self, num_bytes: int) -> None:
        self._part = _PARTS.next(self._part, _Read.WHOLE)
        self._whole = memoryview(bytearray(num_bytes))
        self._targets = deque([self._whole])

    def _send_receipt(self) -> None:
        if not self._receipt:
            return
        try:
            sent = self.socket.send(self._receipt)
        except BlockingIOError:
            return
        if sent != len(self._receipt):
            raise Refused("a receipt did not fit the socket buffer")
        self._receipt = b""
