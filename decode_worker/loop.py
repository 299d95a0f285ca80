"""The decode worker's hot loop.

A sequence's life here::

    DecodeRequest → WAITING ─ blocks reserved ─▶ WAITING_FOR_KV + OpenTransfer
                                 │                    ├─ KVCommitted ─▶ RUNNING → … → freed
                                 │                    └─ KVFailed / Abort ─▶ blocks in quarantine
                                 │                                            ─ BlocksFreed ─▶ free
                                 └─ no prefill worker given: RUNNING (prefills here)

Quarantined blocks are remembered by transfer: whichever of KVCommitted and BlocksFreed comes after
an abort, it means that nobody can write into them any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.engine import Engine, StepResult
from engine.sequence import Sequence, SequenceState
from mesh.errors import DeadlineExceeded, PdmeshError
from mesh.messages import DecodeRequest, PeerRef, PrefillDone, TokenOutput
from mesh.worker_info import LoadSnapshot
from worker.commands import Abort, CancelTransfer, Failed, GatewayLost, Tokens
from worker.leg import Job, check_fits, failure, make_sequence, token_output
from worker.load import take_snapshot


@dataclass(slots=True, frozen=True)
class Submit:
    """Command: a gateway sent a request."""

    request: DecodeRequest
    gateway_id: str
    received_s: float = field(default_factory=time.monotonic)


@dataclass(slots=True, frozen=True)
class KVCommitted:
    """Command: all granted blocks are in place and nobody writes to them any more."""

    done: PrefillDone
    late_s: float = 0.0
    """As in ``Committed``."""
    committed_s: float = field(default_factory=time.monotonic)


@dataclass(slots=True, frozen=True)
class KVFailed:
    """Command: the transfer failed; BlocksFreed follows when the blocks are safe."""

    transfer_id: str
    error: PdmeshError


@dataclass(slots=True, frozen=True)
class BlocksFreed:
    """Command: nobody can write into this failed or cancelled transfer's blocks any more."""

    transfer_id: str


@dataclass(slots=True, frozen=True)
class OpenTransfer:
    """Event: grant these blocks to the prefill worker."""

    transfer_id: str
    prefill: PeerRef
    block_ids: tuple[int, ...]
    first_index: int


Command = Submit | Abort | GatewayLost | KVCommitted | KVFailed | BlocksFreed
Event = OpenTransfer | CancelTransfer | Tokens | Failed


class DecodeLoop:
    """Implements ``worker.model_thread.Loop``. Owns the jobs; the engine owns blocks and model."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._jobs: dict[str, Job] = {}
        self._prefill: dict[str, PeerRef] = {}
        self._quarantine: dict[str, list[int]] = {}
        self._siblings: dict[str, list[Submit]] = {}
        self._events: list[Event] = []
        self.snapshot: LoadSnapshot = take_snapshot(engine)

    def handle(self, command: Command) -> None:
        """Apply one command; see ``Loop``."""
        match command:
            case Submit() if self._awaits_kv(command.request.after):
                self._siblings.setdefault(command.request.after, []).append(command)
            case Submit():
                self._submit(command)
            case Abort():
                self._abort(command.transfer_id)
            case GatewayLost():
                self._forget_siblings(lambda held: held.gateway_id == command.gateway_id)
                for transfer_id, job in list(self._jobs.items()):
                    if job.gateway_id == command.gateway_id:
                        self._abort(transfer_id)
            case KVCommitted():
                self._kv_committed(command)
            case KVFailed():
                self._kv_failed(command)
            case BlocksFreed():
                self._release_quarantine(command.transfer_id)

    def take_events(self) -> list[Event]:
        """See ``Loop``."""
        events, self._events = self._events, []
        return events

    def step(self) -> tuple[list[Event], bool]:
        """Advance every running sequence by one token; see ``Loop``."""
        worked = False
        if self._scheduler.has_work:
            outcome = self._engine.step()
            worked = outcome.has_worked
            for sequence in outcome.expired:
                job = self._forget(sequence)
                error = DeadlineExceeded("the request's deadline passed before it was scheduled")
                self._fail(job, error)
            for sequence in outcome.reserved:
                self._open_transfer(sequence)
            self._emit(outcome.results)
            for sequence, failed in outcome.failed:
                job = self._forget(sequence)
                self._scheduler.finish(sequence)
                self._fail(job, failed)
        events = self.take_events()
        num_held = sum(len(held) for held in self._siblings.values())
        self.snapshot = take_snapshot(self._engine, num_held=num_held)
        return events, worked

    def rest(self) -> None:
        """See ``Loop``."""
        self._engine.rest()

    def _submit(self, submit: Submit) -> None:
        request, gateway_id = submit.request, submit.gateway_id
        emitted = len(request.token_ids) - request.num_prompt_tokens
        total = len(request.token_ids) + request.sampling.max_tokens - emitted
        try:
            if request.transfer_id in self._jobs or request.transfer_id in self._quarantine:
                raise PdmeshError(f"transfer id {request.transfer_id} is in use")
            check_fits(self._engine, request, total)
        except PdmeshError as error:
            message = failure(request.request_id, request.transfer_id, error)
            self._events.append(Failed(gateway_id, message))
            return
        sequence = make_sequence(request)
        self._engine.grammars.attach(sequence)
        self._jobs[request.transfer_id] = Job(sequence, gateway_id, submit.received_s)
        if request.prefill is not None:
            self._prefill[request.transfer_id] = request.prefill
        self._scheduler.add(sequence, remote_prefill=request.prefill is not None)

    def _abort(self, transfer_id: str) -> None:
        job = self._jobs.get(transfer_id)
        if job is not None:
            self._drop(job)
        else:
            self._forget_siblings(lambda held: held.request.transfer_id == transfer_id)

    def _awaits_kv(self, transfer_id: str) -> bool:
        job = self._jobs.get(transfer_id)
        return job is not None and job.sequence.state in (
            SequenceState.WAITING,
            SequenceState.WAITING_FOR_KV,
        )

    def _forget_siblings(self, which: Callable[[Submit], bool]) -> None:
        for transfer_id, held in list(self._siblings.items()):
            held[:] = [submit for submit in held if not which(submit)]
            if not held:
                del self._siblings[transfer_id]

    def _release_siblings(self, transfer_id: str) -> None:
        """Start what waited for this transfer: it finds the KV in the prefix cache, or computes."""
        for submit in self._siblings.pop(transfer_id, ()):
            self._submit(submit)

    def _drop(self, job: Job) -> None:
        """Forget a live job; a granted sequence's blocks go to quarantine first."""
        sequence = job.sequence
        self._forget(sequence)
        if sequence.state is not SequenceState.WAITING_FOR_KV:
            self._scheduler.finish(sequence)
            return
        self._quarantine[sequence.transfer_id] = self._scheduler.withdraw_granted(sequence)
        self._events.append(CancelTransfer(sequence.transfer_id))

    def _open_transfer(self, sequence: Sequence) -> None:
        first_index = sequence.num_cached_tokens // self._scheduler.block_size
        self._events.append(
            OpenTransfer(
                transfer_id=sequence.transfer_id,
                prefill=self._prefill[sequence.transfer_id],
                block_ids=tuple(sequence.block_table[first_index:]),
                first_index=first_index,
            )
        )

    def _kv_committed(self, command: KVCommitted) -> None:
        done = command.done
        job = self._jobs.get(done.transfer_id)
        if job is None:
            self._release_quarantine(done.transfer_id)
            return
        sequence = job.sequence
        if done.finished:
            self._forget(sequence)
            self._scheduler.finish(sequence)
            return
        job.ready_s, job.transfer = command.committed_s, done
        job.transfer_late_s = command.late_s
        self._scheduler.kv_arrived(sequence)
        sequence.append(done.first_token_id)
        self._release_siblings(sequence.transfer_id)

    def _kv_failed(self, command: KVFailed) -> None:
        job = self._jobs.get(command.transfer_id)
        if job is None:
            return
        self._drop(job)
        self._fail(job, command.error)

    def _release_quarantine(self, transfer_id: str) -> None:
        blocks = self._quarantine.pop(transfer_id, None)
        if blocks is not None:
            self._scheduler.pool.release_quarantined(blocks)

    def _emit(self, results: list[StepResult]) -> None:
        outputs: dict[str, list[TokenOutput]] = {}
        for result in results:
            sequence = result.sequence
            job = self._jobs[sequence.transfer_id]
            outputs.setdefault(job.gateway_id, []).append(token_output(job, result.token))
            if sequence.finish_reason is not None:
                self._forget(sequence)
                self._scheduler.finish(sequence)
        for gateway_id, batch in outputs.items():
            self._events.append(Tokens(gateway_id, tuple(batch)))

    def _forget(self, sequence: Sequence) -> Job:
        self._prefill.pop(sequence.transfer_id, None)
        job = self._jobs.pop(sequence.transfer_id)
        self._release_siblings(sequence.transfer_id)
        return job

    def _fail(self, job: Job, error: PdmeshError) -> None:
        sequence = job.sequence
        message = failure(sequence.request_id, sequence.transfer_id, error)
        self._events.append(Failed(job.gateway_id, message))
