"""Control messages that the link could not take at once: in order, bounded, with a deadline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvtransfer.lease import Clock
from mesh.messages import TransferMessage

MAX_QUEUED = 4096

Send = Callable[[str, TransferMessage], bool]


class Outbox:
    """Retries ``send`` in order per peer for ``ttl_s``; leases cover what is lost after that."""

    def __init__(self, send: Send, clock: Clock, ttl_s: float) -> None:
        self._send = send
        self._clock = clock
        self._ttl_s = ttl_s
        self._queues: dict[str, deque[tuple[float, TransferMessage]]] = {}

    def post(self, peer_id: str, message: TransferMessage) -> None:
        """Send now, or queue behind what is queued for this peer already."""
        queue = self._queues.get(peer_id)
        if queue is None:
            if self._send(peer_id, message):
                return
            queue = self._queues[peer_id] = deque(maxlen=MAX_QUEUED)
        queue.append((self._clock() + self._ttl_s, message))

    def poll(self) -> None:
        """Retry; called by the owner's poll."""
        if not self._queues:
            return
        now_s = self._clock()
        for peer_id, queue in list(self._queues.items()):
            while queue and (queue[0][0] <= now_s or self._send(peer_id, queue[0][1])):
                queue.popleft()
            if not queue:
                del self._queues[peer_id]

    def drop(self, peer_id: str) -> None:
        """Forget a dead peer's messages."""
        self._queues.pop(peer_id, None)
