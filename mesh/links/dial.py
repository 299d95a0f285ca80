"""The dialing end of a control link: one DEALER to one start (epoch) of one worker.

    new ── connect() ──> connecting ── Welcome ──> up ──> down
                              └── refused | broke | timeout ──> down

``on_down`` is called exactly once when the link leaves ``connecting`` or ``up`` by itself, never
after the owner called ``close()``. A link that is down stays down: dial the next start anew.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Sequence

import zmq

from mesh.codec import decode, encode
from mesh.errors import (
    IncompatiblePeer,
    PdmeshError,
    ProtocolError,
    VersionMismatch,
    WorkerLost,
)
from mesh.links.listen import PING_INTERVAL_S, SILENCE_S
from mesh.links.socket import LinkSocket, SocketEvent
from mesh.messages import AnyMessage, DataPlaneOffer, Hello, PeerRef, Ping, Pong, Refused, Welcome
from mesh.telemetry import metrics
from mesh.telemetry.rate_limited_log import RateLimitedLog
from mesh.transitions import between_states

_logger = logging.getLogger(__name__)


class _State(enum.Enum):
    NEW = "new"
    CONNECTING = "connecting"
    UP = "up"
    DOWN = "down"


_TRANSITIONS = between_states(
    {
        _State.NEW: (_State.CONNECTING, _State.DOWN),
        _State.CONNECTING: (_State.UP, _State.DOWN),
        _State.UP: (_State.DOWN,),
    }
)


class WorkerLink:
    """Sends to and hears from one worker; all callbacks run in the connecting event loop."""

    def __init__(
        self,
        *,
        peer_id: str,
        epoch: int,
        remote: PeerRef,
        fingerprint: str = "",
        offer: DataPlaneOffer | None = None,
        on_message: Callable[[AnyMessage], None],
        on_down: Callable[[PdmeshError], None],
    ) -> None:
        """Prepare; nothing is dialed before ``connect()``.

        Args:
            peer_id: the dialer's own id.
            epoch: this start of the dialer.
            remote: the start of the worker that is meant.
            fingerprint: the dialer's KV layout, empty for gateways.
            offer: the dialer's data plane, None for gateways.
            on_message: called with every message that is not the link's own.
            on_down: called once with the reason when the link is lost.
        """
        self.remote = remote
        self._peer_id = peer_id
        self._epoch = epoch
        self._fingerprint = fingerprint
        self._offer = offer
        self.remote_offer: DataPlaneOffer | None = None
        """The worker's data plane, once the link is up."""
        self._on_message = on_message
        self._on_down = on_down
        self._state = _State.NEW
        self._socket: LinkSocket | None = None
        self._welcomed: asyncio.Future[None] | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._ping_seq = 0
        self._ticked_s = 0.0
        self._last_seen_s = 0.0
        self._bad_message_log = RateLimitedLog(_logger)

    @property
    def is_up(self) -> bool:
        """Whether the worker has welcomed this link and is not known to be lost."""
        return self._state is _State.UP

    async def connect(self, timeout_s: float = 5.0) -> None:
        """Dial the worker and wait for its Welcome; once per link.

        Raises:
            WorkerLost: nobody answers there, or it is another start or another worker.
            VersionMismatch: the worker speaks another protocol version.
            IncompatiblePeer: the worker can't exchange KV with this one.
            ProtocolError: the worker refused the link; the text is its reason.
        """
        self._move(_State.CONNECTING)
        loop = asyncio.get_running_loop()
        self._welcomed = loop.create_future()
        self._socket = LinkSocket(zmq.DEALER, on_frames=self._on_frames, on_event=self._on_event)
        try:
            try:
                self._socket.connect(self.remote.endpoint)
            except zmq.ZMQError as error:
                self._lose(WorkerLost(f"{self._name()}: bad endpoint: {error}"))
            self._send(
                Hello(
                    peer_id=self._peer_id, epoch=self._epoch,
                    fingerprint=self._fingerprint, offer=self._offer,
                )
            )  # fmt: skip
            async with asyncio.timeout(timeout_s):
                await self._welcomed
        except TimeoutError:
            silent = WorkerLost(f"{self._name()} did not answer within {timeout_s} s")
            self._lose(silent)
            raise silent from None
        finally:
            if self._state is not _State.UP:
                await self.close()

    def send(self, message: AnyMessage) -> bool:
        """Queue ``message`` without blocking; False when the link is not up or its queue is full.

        Raises:
            MessageTooLarge: the message is over the size cap.
        """
        if self._state is not _State.UP:
            return False
        return self._send(message)

    async def close(self) -> None:
        """Close without calling ``on_down``; the worker sees the break at once. Idempotent."""
        if self._state is not _State.DOWN:
            self._move(_State.DOWN)
        self._release()

    def _send(self, message: AnyMessage) -> bool:
        sent = self._socket is not None and self._socket.send((encode(message),))
        if not sent:
            metrics.LINK_SENDS_REFUSED.inc()
        return sent

    def _on_frames(self, frames: Sequence[zmq.Frame]) -> None:
        self._last_seen_s = time.monotonic()
        try:
            if len(frames) != 1:
                raise ProtocolError(f"{len(frames)} frames instead of one")
            message = decode(frames[0].buffer)
        except VersionMismatch as error:
            self._lose(error)
            return
        except ProtocolError as error:
            metrics.LINK_BAD_MESSAGES.labels(code=error.code).inc()
            self._bad_message_log.warning(
                "dropped message peer=%s code=%s %s", self._name(), error.code, str(error)[:200]
            )
            return
        match message:
            case Welcome():
                self._on_welcome(message)
            case Refused():
                self._lose(_refusal_error(message))
            case Pong():
                if message.epoch != self.remote.epoch:
                    self._lose(WorkerLost(f"{self._name()} restarted"))
            case _ if self._state is _State.UP:
                try:
                    self._on_message(message)
                except Exception:
                    # One message's handler must not take the link down.
                    _logger.exception("message handler failed type=%s", type(message).__name__)

    def _on_welcome(self, welcome: Welcome) -> None:
        if (welcome.worker_id, welcome.epoch) != (self.remote.worker_id, self.remote.epoch):
            found = f"{welcome.worker_id} epoch {welcome.epoch}"
            self._lose(WorkerLost(f"{self._name()} is gone; {found} listens in its place"))
        elif self._state is _State.CONNECTING:
            self.remote_offer = welcome.offer
            self._move(_State.UP)
            assert self._welcomed is not None
            if not self._welcomed.done():
                self._welcomed.set_result(None)
            self._ticked_s = time.monotonic()
            self._tick_later()

    def _on_event(self, event: SocketEvent) -> None:
        if event.kind == zmq.EVENT_DISCONNECTED:
            self._lose(WorkerLost(f"connection to {self._name()} broke"))
        elif event.kind == zmq.EVENT_CLOSED and self._state is _State.CONNECTING:
            self._lose(WorkerLost(f"{self._name()} cannot be reached at {self.remote.endpoint}"))

    def _tick_later(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(PING_INTERVAL_S, self._tick)

    def _tick(self) -> None:
        assert self._socket is not None
        self._socket.pump()
        if self._state is not _State.UP:
            return
        now_s = time.monotonic()
        # If this loop stood still, the worker is not to blame for the time it was not read.
        stalled_s = max(0.0, now_s - self._ticked_s - 2 * PING_INTERVAL_S)
        self._ticked_s = now_s
        self._last_seen_s = min(now_s, self._last_seen_s + stalled_s)
        if now_s - self._last_seen_s > SILENCE_S:
            self._lose(WorkerLost(f"{self._name()} was silent for {SILENCE_S} s"))
            return
        self._ping_seq += 1
        self._send(Ping(seq=self._ping_seq))
        self._tick_later()

    def _lose(self, error: PdmeshError) -> None:
        """Go down by ourselves: the one place that reports it."""
        if self._state not in (_State.CONNECTING, _State.UP):
            return
        self._move(_State.DOWN)
        self._release()
        if self._welcomed is not None and not self._welcomed.done():
            self._welcomed.set_exception(error)
        _logger.debug("link down peer=%s code=%s %s", self._name(), error.code, error)
        try:
            self._on_down(error)
        except Exception:
            _logger.exception("link-down handler failed peer=%s", self._name())

    def _release(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _move(self, state: _State) -> None:
        self._state = _TRANSITIONS.next(self._state, state)

    def _name(self) -> str:
        return f"{self.remote.worker_id} (epoch {self.remote.epoch})"


def _refusal_error(refused: Refused) -> PdmeshError:
    for kind in (VersionMismatch, IncompatiblePeer, WorkerLost):
        if refused.code == kind.code:
            return kind(refused.message)
    return ProtocolError(f"{refused.code}: {refused.message}")
