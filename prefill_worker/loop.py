"""The prefill worker's hot loop.

A sequence's life here::

    PrefillRequest → WAITING → RUNNING ─ chunk ─▶ SendBlocks …
                    └─ last chunk ─▶ Tokens, FinishTransfer → SENDING ─ TransferEnded ─▶ freed

Blocks stay pinned from the first SendBlocks until the control loop says that no write of them is in
flight any more (TransferEnded). A sequence never grows here, so it is never preempted.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.engine import Engine, StepResult
from engine.scheduling.step_plan import ScheduledChunk
from engine.sequence import Sequence, SequenceState
from mesh.errors import DeadlineExceeded, PdmeshError, TransferFailed
from mesh.messages import PrefillRequest
from mesh.worker_info import LoadSnapshot
from worker.commands import Abort, CancelTransfer, Failed, GatewayLost, Tokens
from worker.leg import Job, check_fits, failure, make_sequence, token_output
from worker.load import take_snapshot


@dataclass(slots=True, frozen=True)
class Submit:
    """Command: a gateway sent a request; its transfer is expected already."""

    request: PrefillRequest
    gateway_id: str
    received_s: float = field(default_factory=time.monotonic)


@dataclass(slots=True, frozen=True)
class Granted:
    """Command: a decode worker has room for this transfer."""

    transfer_id: str


@dataclass(slots=True, frozen=True)
class TransferEnded:
    """Command: no write of this transfer is in flight, and none will start."""

    transfer_id: str
    failure: str | None
    """Why it failed; None after an acknowledged transfer."""


@dataclass(slots=True, frozen=True)
class Congestion:
    """Command: computed KV piles up before these decode workers, and no others."""

    decode_worker_ids: frozenset[str]


@dataclass(slots=True, frozen=True)
class SendBlocks:
    """Event: these blocks are final; logical block ``first_index + i`` is ``block_ids[i]``."""

    transfer_id: str
    first_index: int
    block_ids: tuple[int, ...]
    part: int | None = None
    """Which group of layers of them; None: all."""
    step: int = 0
    """Number of the step that computed them last."""


@dataclass(slots=True, frozen=True)
class FinishTransfer:
    """Event: the prompt is done; what was not submitted will not come."""

    transfer_id: str
    first_token_id: int
    finished: bool


_MAX_EARLY_GRANTS = 4096
"""Grants remembered whose request has not come yet; the oldest are forgotten."""

Command = Submit | Abort | GatewayLost | Granted | TransferEnded | Congestion
Event = SendBlocks | FinishTransfer | CancelTransfer | Tokens | Failed


class PrefillLoop:
    """Implements ``worker.model_thread.Loop``. Owns the jobs; the engine owns blocks and model."""

    def __init__(self, engine: Engine, num_layer_groups: int = 1) -> None:
        """Borrow the engine; with several groups of layers KV leaves during the forward."""
        self._engine = engine
        self._num_layer_groups = num_layer_groups
        self.emit: Callable[[list[Event]], None] = self._keep
        """Takes what can't wait for the end of the step; by default it does wait."""
        self._scheduler = engine.scheduler
        self._jobs: dict[str, Job] = {}
        self._num_submitted: dict[str, int] = {}
        self._receivers: dict[str, str] = {}
        """Decode worker of every job."""
        self._congested: frozenset[str] = frozenset()
        self._early_grants: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._events: list[Event] = []
        self.snapshot: LoadSnapshot = take_snapshot(engine)

    def handle(self, command: Command) -> None:
        """Apply one command; see ``Loop``."""
        match command:
            case Submit():
                self._submit(command.request, command.gateway_id, command.received_s)
            case Abort():
                self._abort(command.transfer_id)
            case GatewayLost():
                for transfer_id, job in list(self._jobs.items()):
                    if job.gateway_id == command.gateway_id:
                        self._abort(transfer_id)
            case Granted():
                self._granted(command.transfer_id)
            case TransferEnded():
                self._transfer_ended(command)
            case Congestion():
                self._congested = command.decode_worker_ids
                for transfer_id, job in self._jobs.items():
                    job.sequence.is_backpressured = self._receivers[transfer_id] in self._congested

    def take_events(self) -> list[Event]:
        """See ``Loop``."""
        events, self._events = self._events, []
        return events

    def step(self) -> tuple[list[Event], bool]:
        """Compute one chunk batch; see ``Loop``."""
        worked = False
        if self._scheduler.has_work:
            grouped = self._num_layer_groups > 1
            outcome = self._engine.step(self._on_layer_group if grouped else None)
            worked = outcome.has_worked
            for sequence in outcome.expired:
                self._drop_expired(sequence)
            sampled = {result.sequence for result in outcome.results}
            for chunk in () if grouped else outcome.computed:
                self._submit_finished_blocks(chunk, prompt_done=chunk.sequence in sampled)
            for result in outcome.results:
                self._first_token(result)
            for sequence, failed in outcome.failed:
                self._scheduler.hold_for_sending(sequence)  # its blocks may be on the wire
                self._give_up(sequence, failed)
            if outcome.shed is not None:
                self._shed(outcome.shed)
        events = self.take_events()
        self.snapshot = take_snapshot(self._engine)
        return events, worked

    def rest(self) -> None:
        """See ``Loop``."""
        self._engine.rest()

    def _submit(self, request: PrefillRequest, gateway_id: str, received_s: float) -> None:
        try:
            if request.transfer_id in self._jobs:
                raise PdmeshError(f"transfer id {request.transfer_id} is in use")
            check_fits(self._engine, request, len(request.token_ids))
        except PdmeshError as error:
            message = failure(request.request_id, request.transfer_id, error)
            self._events.append(Failed(gateway_id, message))
            if request.transfer_id not in self._jobs:
                self._events.append(CancelTransfer(request.transfer_id))
            return
        sequence = make_sequence(request)
        self._engine.grammars.attach(sequence)
        sequence.has_receiver = request.transfer_id in self._early_grants
        self._early_grants.pop(request.transfer_id, None)
        self._jobs[request.transfer_id] = Job(sequence, gateway_id, received_s)
        self._num_submitted[request.transfer_id] = 0
        self._receivers[request.transfer_id] = request.decode.worker_id
        sequence.is_backpressured = request.decode.worker_id in self._congested
        self._scheduler.add(sequence)

    def _granted(self, transfer_id: str) -> None:
        job = self._jobs.get(transfer_id)
        if job is not None:
            job.sequence.has_receiver = True
            return
        self._early_grants[transfer_id] = None
        if len(self._early_grants) > _MAX_EARLY_GRANTS:
            self._early_grants.popitem(last=False)

    def _shed(self, sequence: Sequence) -> None:
        """Give up a computed sequence that no decode worker has room for."""
        self._give_up(sequence, TransferFailed("no decode worker had room for the KV"))

    def _give_up(self, sequence: Sequence, error: PdmeshError) -> None:
        """Tell the gateway; the blocks come back when the transfer has ended."""
        job = self._jobs[sequence.transfer_id]
        message = failure(sequence.request_id, sequence.transfer_id, error)
        self._events += [CancelTransfer(sequence.transfer_id), Failed(job.gateway_id, message)]

    def _abort(self, transfer_id: str) -> None:
        job = self._jobs.get(transfer_id)
        if job is None:
            return
        if job.sequence.state is SequenceState.RUNNING:
            self._scheduler.hold_for_sending(job.sequence)  # its blocks may be on the wire
        elif job.sequence.state is SequenceState.WAITING:
            self._scheduler.finish(job.sequence)
        self._events.append(CancelTransfer(transfer_id))

    def _transfer_ended(self, command: TransferEnded) -> None:
        job = self._jobs.pop(command.transfer_id, None)
        if job is None:
            return
        del self._num_submitted[command.transfer_id], self._receivers[command.transfer_id]
        sequence = job.sequence
        silent = sequence.state in (SequenceState.SENDING, SequenceState.FINISHED)
        if sequence.state is not SequenceState.FINISHED:
            self._scheduler.finish(sequence)
        if command.failure is not None and not silent:
            error = TransferFailed(f"KV transfer failed: {command.failure}")
            message = failure(sequence.request_id, sequence.transfer_id, error)
            self._events.append(Failed(job.gateway_id, message))

    def _drop_expired(self, sequence: Sequence) -> None:
        # The scheduler has freed it; the job ends when the sender has let go of the transfer.
        error = DeadlineExceeded("the request's deadline passed before it was scheduled")
        self._give_up(sequence, error)

    def _keep(self, events: list[Event]) -> None:
        self._events += events

    def _on_layer_group(self, chunks: list[ScheduledChunk], group: int) -> None:
        """During the forward: this group's KV of the step's chunks is written.

        Whether the answer ends at its first token is not known yet, so its blocks go too.
        """
        ready = self.take_events()
        for chunk in chunks:
            transfer_id = chunk.sequence.transfer_id
            start, blocks = self._finished_blocks(
                chunk.sequence,
                chunk.end,
                prompt_done=chunk.samples,
            )
            if blocks:
                ready.append(
                    SendBlocks(transfer_id, start, blocks, group, self._engine.num_steps_done)
                )
            if group == self._num_layer_groups - 1:
                self._num_submitted[transfer_id] = start + len(blocks)
        if ready:
            self.emit(ready)

    def _submit_finished_blocks(self, chunk: ScheduledChunk, *, prompt_done: bool) -> None:
        """Offer the blocks that will not change any more, the last partial one at the end."""
        sequence = chunk.sequence
        if sequence.finish_reason is not None:
            return  # the answer ended at its first token: nobody needs the KV
        start, blocks = self._finished_blocks(sequence, chunk.end, prompt_done=prompt_done)
        if blocks:
            step = self._engine.num_steps_done
            self._events.append(SendBlocks(sequence.transfer_id, start, blocks, step=step))
            self._num_submitted[sequence.transfer_id] = start + len(blocks)

    def _finished_blocks(
        self, sequence: Sequence, num_computed: int, *, prompt_done: bool
    ) -> tuple[int, tuple[int, ...]]:
        """Blocks not offered yet that will not change after ``num_computed`` tokens.

        Returns:
            The logical index of the first one, and their ids.
        """
        size = self._scheduler.block_size
        end = -(-num_computed // size) if prompt_done else num_computed // size
        start = self._num_submitted[sequence.transfer_id]
        return start, tuple(sequence.block_table[start:end])

    def _first_token(self, result: StepResult) -> None:
        sequence = result.sequence
        job = self._jobs[sequence.transfer_id]
        self._scheduler.hold_for_sending(sequence)
        self._events.append(Tokens(job.gateway_id, (token_output(job, result.token),)))
        self._events.append(
            FinishTransfer(
                sequence.transfer_id,
                first_token_id=result.token.token_id,
                finished=sequence.finish_reason is not None,
            )
        )
