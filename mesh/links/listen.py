"""The listening end of the control links: one ROUTER per worker.

A peer of the server lives like this:

    (connection) ── Hello ok ──> up ── break | 2 s silence | a new Hello of the same peer ──> down
         └── Hello with another version, fingerprint or an older epoch ──> Refused

``on_peer_down`` is called exactly once for every peer that was up, unless the server closes first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from mesh.codec import decode, encode
from mesh.errors import (
    ConfigError,
    IncompatiblePeer,
    ProtocolError,
    VersionMismatch,
    WorkerLost,
)
from mesh.links.socket import LinkSocket, SocketEvent
from mesh.messages import AnyMessage, DataPlaneOffer, Hello, Ping, Pong, Refused, Welcome
from mesh.telemetry import metrics
from mesh.telemetry.rate_limited_log import RateLimitedLog

PING_INTERVAL_S = 0.25
SILENCE_S = 2.0
"""A peer from which nothing came for this long is down."""

MAX_PEERS = 1024
MAX_PEER_ID_CHARS = 256

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Peer:
    peer_id: str
    epoch: int
    routing_id: bytes
    fd: int
    last_seen_s: float


class WorkerServer:
    """Accepts links from gateways and decode workers and routes messages by peer id.

    All callbacks run in the event loop that called ``start()``; they must not block.
    """

    def __init__(
        self,
        *,
        bind: str,
        worker_id: str,
        epoch: int,
        fingerprint: str,
        offer: DataPlaneOffer | None = None,
        on_message: Callable[[str, AnyMessage], None],
        on_peer_down: Callable[[str], None],
    ) -> None:
        """Prepare; nothing is bound before ``start()``.

        Args:
            bind: ``tcp://host:port``; port 0 takes any free one.
            worker_id: this worker's id.
            epoch: this start of the worker.
            fingerprint: KV layout; dialers with another non-empty one are refused.
            offer: this worker's data plane; dialers whose own shares no transport are refused.
            on_message: called with (peer_id, message).
            on_peer_down: called with the id of a peer that was up.
        """
        self.endpoint = bind
        self._worker_id = worker_id
        self._epoch = epoch
        self._fingerprint = fingerprint
        self._offer = offer
        self._on_message = on_message
        self._on_peer_down = on_peer_down
        self._peers: dict[str, _Peer] = {}
        self._by_routing_id: dict[bytes, _Peer] = {}
        self._by_fd: dict[int, _Peer] = {}
        self._socket: LinkSocket | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._swept_s = 0.0
        self._bad_message_log = RateLimitedLog(_logger)

    @property
    def num_peers(self) -> int:
        """Peers that are up."""
        return len(self._peers)

    async def start(self) -> None:
        """Bind and serve; ``endpoint`` then holds the real address.

        Raises:
            ConfigError: the address cannot be bound.
        """
        socket = LinkSocket(zmq.ROUTER, on_frames=self._on_frames, on_event=self._on_event)
        try:
            self.endpoint = socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(f"control_port: cannot bind {self.endpoint}: {error}") from error
        self._socket = socket
        self._swept_s = time.monotonic()
        self._sweep_later()

    def send(self, peer_id: str, message: AnyMessage) -> bool:
        """Queue ``message`` for a peer without blocking.

        Returns:
            False when the peer is unknown or gone, or its queue is full.

        Raises:
            MessageTooLarge: the message is over the size cap.
        """
        peer = self._peers.get(peer_id)
        if peer is None:
            return False
        return self._send_to(peer.routing_id, message)

    async def close(self) -> None:
        """Stop serving; peers see the break at once. Idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._peers.clear()
        self._by_routing_id.clear()
        self._by_fd.clear()

    def _send_to(self, routing_id: bytes, message: AnyMessage) -> bool:
        if self._socket is None:
            return False
        sent = self._socket.send((routing_id, encode(message)))
        if not sent:
            metrics.LINK_SENDS_REFUSED.inc()
        return sent

    def _on_frames(self, frames: Sequence[zmq.Frame]) -> None:
        routing_id = frames[0].bytes
        peer = self._by_routing_id.get(routing_id)
        try:
            if len(frames) != 2:
                raise ProtocolError(f"{len(frames) - 1} frames instead of one")
            message = decode(frames[1].buffer)
        except VersionMismatch as error:
            self._count_bad(peer, error)
            self._send_to(routing_id, Refused(code=error.code, message=str(error)))
            return
        except ProtocolError as error:
            self._count_bad(peer, error)
            return
        if isinstance(message, Hello):
            self._on_hello(routing_id, frames[1], message)
            return
        if peer is None:
            # Declared dead, or never greeted: tell it, so that it does not wait for answers.
            text = f"{self._worker_id} does not know this link"
            self._send_to(routing_id, Refused(code=WorkerLost.code, message=text))
            return
        peer.last_seen_s = time.monotonic()
        if isinstance(message, Ping):
            self._send_to(routing_id, Pong(seq=message.seq, epoch=self._epoch))
            return
        try:
            self._on_message(peer.peer_id, message)
        except Exception:
            # One message's handler must not take the link of every other peer down.
            _logger.exception("message handler failed type=%s", type(message).__name__)

    def _on_hello(self, routing_id: bytes, frame: zmq.Frame, hello: Hello) -> None:
        refusal = self._refusal(hello)
        if refusal is not None:
            _logger.warning("refused link code=%s %s", refusal.code, refusal.message)
            self._send_to(routing_id, refusal)
            return
        fd = int(frame.get(zmq.SRCFD))
        assert self._socket is not None
        self._socket.forget_events_before_accept(fd)
        for old in (self._peers.get(hello.peer_id), self._by_fd.get(fd)):
            if old is not None:
                self._drop(old, "replaced by a new link")
        peer = _Peer(hello.peer_id, hello.epoch, routing_id, fd, time.monotonic())
        self._peers[peer.peer_id] = peer
        self._by_routing_id[routing_id] = peer
        self._by_fd[fd] = peer
        _logger.debug("link up peer=%s epoch=%d", peer.peer_id, peer.epoch)
        welcome = Welcome(worker_id=self._worker_id, epoch=self._epoch, offer=self._offer)
        self._send_to(routing_id, welcome)

    def _refusal(self, hello: Hello) -> Refused | None:
        if not 0 < len(hello.peer_id) <= MAX_PEER_ID_CHARS:
            return Refused(code=ProtocolError.code, message="peer_id is empty or too long")
        known = self._peers.get(hello.peer_id)
        if known is not None and hello.epoch < known.epoch:
            text = f"{hello.peer_id} has a newer start than epoch {hello.epoch}"
            return Refused(code=ProtocolError.code, message=text)
        if hello.fingerprint and hello.fingerprint != self._fingerprint:
            text = (
                f"KV layout of {hello.peer_id} ({hello.fingerprint}) differs from that of "
                f"{self._worker_id} ({self._fingerprint})"
            )
            return Refused(code=IncompatiblePeer.code, message=text[:1024])
        ours, theirs = self._offer, hello.offer
        if ours and theirs and not set(ours.transports) & set(theirs.transports):
            text = (
                f"{hello.peer_id} reads KV over {', '.join(theirs.transports)}, "
                f"{self._worker_id} writes over {', '.join(ours.transports)}"
            )
            return Refused(code=IncompatiblePeer.code, message=text[:1024])
        if known is None and len(self._peers) >= MAX_PEERS:
            return Refused(code=ProtocolError.code, message=f"over {MAX_PEERS} links")
        return None

    def _on_event(self, event: SocketEvent) -> None:
        if event.kind == zmq.EVENT_DISCONNECTED:
            peer = self._by_fd.get(event.fd)
            if peer is not None:
                self._drop(peer, "connection broke")

    def _drop(self, peer: _Peer, reason: str) -> None:
        if self._peers.get(peer.peer_id) is not peer:
            return
        del self._peers[peer.peer_id]
        del self._by_routing_id[peer.routing_id]
        if self._by_fd.get(peer.fd) is peer:
            del self._by_fd[peer.fd]
        _logger.debug("link down peer=%s reason=%s", peer.peer_id, reason)
        try:
            self._on_peer_down(peer.peer_id)
        except Exception:
            _logger.exception("peer-down handler failed peer=%s", peer.peer_id)

    def _sweep_later(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(PING_INTERVAL_S, self._sweep)

    def _sweep(self) -> None:
        self._sweep_later()
        if self._socket is not None:
            self._socket.pump()
        now_s = time.monotonic()
        # If this loop stood still, the peers are not to blame for the time they were not read.
        stalled_s = max(0.0, now_s - self._swept_s - 2 * PING_INTERVAL_S)
        self._swept_s = now_s
        for peer in list(self._peers.values()):
            peer.last_seen_s = min(now_s, peer.last_seen_s + stalled_s)
            if now_s - peer.last_seen_s > SILENCE_S:
                self._drop(peer, f"silent for {SILENCE_S} s")

    def _count_bad(self, peer: _Peer | None, error: ProtocolError) -> None:
        metrics.LINK_BAD_MESSAGES.labels(code=error.code).inc()
        name = peer.peer_id if peer is not None else "unknown"
        self._bad_message_log.warning(
            "dropped message peer=%s code=%s %s", name, error.code, str(error)[:200]
        )
