"""The gateway's links to all workers, and the dispatch of what they send.

    ClusterView entry appears ──> dial ──> up ──> routable
                                   ↑        │ down: fail its attempts, dial again after a pause
    entry gone, no attempt left ──> close <─┘

The link, not the registry, says whether a worker is alive; the registry says which exist.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from gateway.routing import router
from mesh.backoff import Backoff
from mesh.cancel import cancel_and_wait
from mesh.config import ROLES
from mesh.errors import PdmeshError, WorkerLost
from mesh.links.dial import WorkerLink
from mesh.messages import (
    AnyMessage,
    PeerRef,
    RequestFailed,
    StatusReply,
    StatusRequest,
    StepOutput,
    TokenOutput,
)
from mesh.registry.view import WorkerEntry
from mesh.telemetry import metrics
from mesh.worker_info import LoadSnapshot, WorkerInfo

_logger = logging.getLogger(__name__)

_SNAPSHOT_LAG_S = 0.03
"""A snapshot heard this soon after a request was sent may not count it yet."""

_UNSEEN_S = 2.0
"""Without snapshots (registry lost) what was sent counts this long."""

_CHOSEN = metrics.counter(
    "pdmesh:router_choices", "Attempts by the workers they were sent to.", ["worker"]
)
_REFUSED = metrics.counter(
    "pdmesh:router_refusals", "Attempts for which no pair was found.", ["code"]
)
_WORKERS = metrics.gauge(
    "pdmesh:gateway_workers", "Workers known here, by whether their link is up.", ["role", "up"]
)
_LATE = metrics.counter("pdmesh:gateway_late_messages", "Messages of attempts that are over.")


class WorkerSource(Protocol):
    """Where the workers come from: ``mesh.registry.view.ClusterView``."""

    def workers(self) -> list[WorkerEntry]:
        """All workers believed to be alive."""
        ...


class WorkerListener(Protocol):
    """What listens to the workers for one attempt of a request."""

    def on_output(self, worker_id: str, output: TokenOutput) -> None:
        """A worker made tokens."""
        ...

    def on_failed(self, worker_id: str, failed: RequestFailed) -> None:
        """A worker gave up."""
        ...

    def on_lost(self, worker_id: str, error: PdmeshError) -> None:
        """The link to a worker is down."""
        ...


@dataclass(slots=True)
class _Sent:
    at_s: float
    tokens: int
    blocks: int


@dataclass(slots=True, eq=False)
class Worker:
    """One start of one worker, as seen from here."""

    info: WorkerInfo
    link: WorkerLink | None = None
    task: asyncio.Task[None] | None = None
    registered: bool = True
    load: LoadSnapshot | None = None
    load_at_s: float = 0.0
    attempts: dict[str, WorkerListener] = field(default_factory=dict)
    """Those that use this worker, by transfer id."""
    sent: dict[str, _Sent] = field(default_factory=dict)

    @property
    def ref(self) -> PeerRef:
        """How other workers dial it."""
        return PeerRef(
            worker_id=self.info.worker_id,
            epoch=self.info.epoch,
            endpoint=self.info.endpoint,
            tensor_parallel=self.info.tensor_parallel,
        )

    @property
    def is_up(self) -> bool:
        """Whether requests can be sent to it."""
        return self.link is not None and self.link.is_up

    def send(self, message: AnyMessage) -> bool:
        """Queue a message; False when the worker is lost or its queue is full."""
        return self.link is not None and self.link.send(message)

    def candidate(self, now_s: float) -> router.Candidate:
        """Its load for the router: the last snapshot plus what it cannot have counted."""
        newest_s = max(self.load_at_s - _SNAPSHOT_LAG_S, now_s - _UNSEEN_S)
        for transfer_id in [t for t, sent in self.sent.items() if sent.at_s < newest_s]:
            del self.sent[transfer_id]
        unseen = router.Unseen(
            tokens=sum(sent.tokens for sent in self.sent.values()),
            blocks=sum(sent.blocks for sent in self.sent.values()),
            sequences=len(self.sent),
        )
        return router.Candidate(info=self.info, load=self.load, unseen=unseen)


class Cluster:
    """Dials workers as they appear and knows which pair can serve a request now."""

    def __init__(self, *, gateway_id: str, epoch: int, model: str) -> None:
        """Prepare; ``start`` begins to dial.

        Args:
            gateway_id: This gateway's peer id on every link.
            epoch: This start of the gateway.
            model: Workers that serve another model are left alone.
        """
        self._gateway_id = gateway_id
        self._epoch = epoch
        self._model = model
        self._source: WorkerSource | None = None
        self._workers: dict[tuple[str, int], Worker] = {}
        self._incompatible: set[router.Pair] = set()
        """Pairs that refused each other, until one of them goes."""
        self._closing: set[asyncio.Task[None]] = set()
        self._status_seq = 0
        self._status: dict[tuple[str, int], asyncio.Future[StatusReply]] = {}

    def start(self, source: WorkerSource) -> None:
        """Follow ``source``; call ``refresh`` whenever its set of workers changes."""
        self._source = source
        self.refresh()

    async def close(self) -> None:
        """Drop every link."""
        self._source = None
        tasks = [worker.task for worker in self._workers.values() if worker.task is not None]
        await asyncio.gather(*map(cancel_and_wait, (*tasks, *self._closing)))
        self._workers.clear()

    def can_serve(self) -> bool:
        """Whether a request could be served now, by the newest snapshots."""
        return router.has_pair(self._candidates(), self._incompatible)

    @property
    def workers(self) -> list[Worker]:
        """Every worker known, also those whose link is down."""
        return list(self._workers.values())

    @property
    def max_model_len(self) -> int | None:
        """Longest sequence that some decode worker can hold; None while there is none."""
        infos = [worker.info for worker in self._workers.values()]
        return max((router.max_tokens(i) for i in infos if i.role == "decode"), default=None)

    def refresh(self) -> None:
        """Dial new workers, let those go that left the registry."""
        entries = self._entries()
        for key, entry in entries.items():
            if key not in self._workers:
                worker = Worker(info=entry.info)
                self._workers[key] = worker
                worker.task = asyncio.create_task(
                    self._keep_linked(worker), name=f"link-{entry.info.worker_id}"
                )
        for key, worker in list(self._workers.items()):
            worker.registered = key in entries
            self._drop_if_unused(worker)

    def refresh_loads(self) -> None:
        """Give every worker its newest snapshot; one that left keeps its last."""
        for key, entry in self._entries().items():
            worker = self._workers.get(key)
            if worker is not None and entry.load is not None:
                worker.load, worker.load_at_s = entry.load, entry.updated_s

    def count_workers(self) -> None:
        """Bring the gauge of workers up to date."""
        for role in ROLES:
            known = [worker for worker in self._workers.values() if worker.info.role == role]
            num_up = sum(worker.is_up for worker in known)
            _WORKERS.labels(role=role, up="true").set(num_up)
            _WORKERS.labels(role=role, up="false").set(len(known) - num_up)

    def choose(self, need: router.Need, avoid: Collection[str]) -> tuple[Worker, Worker]:
        """The prefill and the decode worker for a request.

        Raises:
            Unavailable, ContextTooLong, Overloaded: as ``router.choose``.
        """
        try:
            pair = router.choose(self._candidates(), need, avoid, self._incompatible)
        except PdmeshError as error:
            _REFUSED.labels(code=error.code).inc()
            raise
        for worker_id in pair:
            _CHOSEN.labels(worker=worker_id).inc()
        up = {worker.info.worker_id: worker for worker in self._routable()}
        return up[pair.prefill_id], up[pair.decode_id]

    def note_incompatible(self, prefill: Worker, decode: Worker, reason: str) -> None:
        """These two can't exchange KV: do not pair them again while both live."""
        pair = router.Pair(prefill.info.worker_id, decode.info.worker_id)
        _logger.error("prefill=%s decode=%s can't be paired: %s", *pair, reason)
        self._incompatible.add(pair)

    def attach(
        self, worker: Worker, transfer_id: str, listener: WorkerListener, num_tokens: int
    ) -> None:
        """Deliver to ``listener`` what ``worker`` says about this transfer, and count its load."""
        worker.attempts[transfer_id] = listener
        blocks = -(-num_tokens // max(1, worker.info.block_size))
        worker.sent[transfer_id] = _Sent(time.monotonic(), num_tokens, blocks)

    def detach(self, worker: Worker, transfer_id: str) -> None:
        """Stop delivering; what the worker still says about this transfer is dropped."""
        worker.attempts.pop(transfer_id, None)
        worker.sent.pop(transfer_id, None)
        self._drop_if_unused(worker)

    async def status(self, worker: Worker, timeout_s: float) -> StatusReply | None:
        """Ask a worker for its live census; None when it does not answer in time."""
        self._status_seq += 1
        key = (worker.info.worker_id, self._status_seq)
        reply: asyncio.Future[StatusReply] = asyncio.get_running_loop().create_future()
        self._status[key] = reply
        try:
            if not worker.send(StatusRequest(seq=self._status_seq)):
                return None
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            return None
        finally:
            del self._status[key]

    def _entries(self) -> dict[tuple[str, int], WorkerEntry]:
        if self._source is None:
            return {}
        return {
            (entry.info.worker_id, entry.info.epoch): entry
            for entry in self._source.workers()
            if entry.info.model == self._model
        }

    def _routable(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.registered and worker.is_up]

    def _candidates(self) -> list[router.Candidate]:
        self.refresh_loads()
        now_s = time.monotonic()
        return [worker.candidate(now_s) for worker in self._routable()]

    def _drop_if_unused(self, worker: Worker) -> None:
        """A worker that left the registry finishes what it has, as long as its link is up."""
        if worker.registered or worker.attempts:
            return
        key = (worker.info.worker_id, worker.info.epoch)
        if self._workers.get(key) is not worker:
            return
        del self._workers[key]
        with suppress(KeyError):  # it was never chosen
            _CHOSEN.remove(worker.info.worker_id)
        self._incompatible = {p for p in self._incompatible if worker.info.worker_id not in p}
        if worker.task is not None:
            worker.task.cancel()
            self._closing.add(worker.task)
            worker.task.add_done_callback(self._closing.discard)

    async def _keep_linked(self, worker: Worker) -> None:
        """Dial, and dial again after each loss, for as long as the worker is wanted."""
        backoff = Backoff(0.1, 2.0)
        while True:
            down = asyncio.Event()
            link = WorkerLink(
                peer_id=self._gateway_id,
                epoch=self._epoch,
                remote=worker.ref,
                on_message=self._receiver(worker),
                on_down=self._loser(worker, down),
            )
            worker.link = link
            try:
                await link.connect()
                _logger.info("linked worker=%s role=%s", worker.info.worker_id, worker.info.role)
                backoff.reset()
                await down.wait()
            except PdmeshError as error:
                _logger.debug("cannot link worker=%s: %s", worker.info.worker_id, error)
            finally:
                await link.close()
            if not worker.registered:
                self._drop_if_unused(worker)
            await asyncio.sleep(backoff.next_delay_s())

    def _receiver(self, worker: Worker) -> Callable[[AnyMessage], None]:
        worker_id = worker.info.worker_id
        attempts = worker.attempts

        def on_message(message: AnyMessage) -> None:
            match message:
                case StepOutput():
                    for output in message.outputs:
                        attempt = attempts.get(output.transfer_id)
                        if attempt is not None:
                            attempt.on_output(worker_id, output)
                        else:
                            _LATE.inc()
                case RequestFailed():
                    attempt = attempts.get(message.transfer_id)
                    if attempt is not None:
                        attempt.on_failed(worker_id, message)
                    else:
                        _LATE.inc()
                case StatusReply():
                    reply = self._status.get((worker_id, message.seq))
                    if reply is not None and not reply.done():
                        reply.set_result(message)
                case _:
                    _logger.warning("unexpected %s from %s", type(message).__name__, worker_id)

        return on_message

    def _loser(self, worker: Worker, down: asyncio.Event) -> Callable[[PdmeshError], None]:
        def on_down(error: PdmeshError) -> None:
            down.set()
            if worker.attempts:
                _logger.warning(
                    "lost worker=%s attempts=%d %s",
                    worker.info.worker_id,
                    len(worker.attempts),
                    error,
                )
            lost = error if isinstance(error, WorkerLost) else WorkerLost(str(error))
            for attempt in list(worker.attempts.values()):
                attempt.on_lost(worker.info.worker_id, lost)

        return on_down
