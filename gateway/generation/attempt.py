"""One try to serve a request on one pair of workers.

    RUNNING ── last token ──> FINISHED
       ├── a leg fails, is lost, or breaks the order ──> FAILED     (the other leg is aborted)
       └── abort() ──> ABORTED                                      (both legs are aborted)

Token order within an attempt that starts at output position ``base``:

    P:  base            exactly one token
    D:  base+1, base+2, …      may overtake P's token on its own connection; then it waits here

Without P (the prompt's KV is on D already, or will be) every token comes from D.
"""

from __future__ import annotations

import enum
import uuid
from typing import Any, Protocol

from gateway.errors import error_from_code
from gateway.generation.generation_request import GenerationRequest
from gateway.routing.cluster import Cluster, Worker
from mesh.errors import (
    IncompatiblePeer,
    MessageTooLarge,
    PdmeshError,
    ProtocolError,
    TransferFailed,
    WorkerLost,
)
from mesh.messages import (
    AbortRequest,
    DecodeRequest,
    PrefillRequest,
    RequestFailed,
    TokenOutput,
)
from mesh.transitions import between_states

MAX_OVERTAKING_OUTPUTS = 1024
"""Decode outputs kept while the prefill worker's token is on its way."""


class _State(enum.Enum):
    NEW = "new"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"


_TRANSITIONS = between_states(
    {
        _State.NEW: (_State.RUNNING,),
        _State.RUNNING: (_State.FINISHED, _State.FAILED, _State.ABORTED),
    }
)


class AttemptOwner(Protocol):
    """The request that an attempt works for."""

    def on_tokens(self, output: TokenOutput) -> None:
        """The next tokens, in order, without gaps."""
        ...

    def on_attempt_failed(self, error: PdmeshError, avoid: set[str], retryable: bool) -> None:
        """This attempt is over; the next one should avoid these workers."""
        ...


class Attempt:
    """Owns both legs on the workers until the last token, a failure or ``abort()``."""

    def __init__(
        self,
        cluster: Cluster,
        owner: AttemptOwner,
        *,
        prefill: Worker | None,
        decode: Worker,
        base: int,
    ) -> None:
        """Prepare; nothing is sent before ``start``.

        Args:
            cluster: Delivers the workers' messages.
            owner: Hears the tokens and the failure.
            prefill: Computes the prompt and makes token ``base``; None: ``decode`` does that too.
            decode: Makes the tokens after it.
            base: Number of output tokens that earlier attempts made.
        """
        self.transfer_id = uuid.uuid4().hex
        self._cluster = cluster
        self._owner = owner
        self._prefill = prefill
        self._decode = decode
        self._workers = (decode,) if prefill is None else (decode, prefill)
        self._base = base
        self._next_index = base
        self._overtaking: list[TokenOutput] = []
        self._decode_answered = False
        self._request_id = ""
        self._state = _State.NEW

    def start(
        self,
        request: GenerationRequest,
        *,
        token_ids: tuple[int, ...],
        ttl_s: float,
        after: str = "",
        traceparent: str = "",
    ) -> None:
        """Send both legs at once (fields as in the messages)."""
        self._move(_State.RUNNING)
        self._request_id = request.request_id
        for worker in self._workers:
            self._cluster.attach(worker, self.transfer_id, self, len(token_ids))
        shared: dict[str, Any] = {
            "request_id": request.request_id,
            "transfer_id": self.transfer_id,
            "token_ids": token_ids,
            "num_prompt_tokens": len(request.prompt_ids),
            "sampling": request.sampling,
            "ttl_s": ttl_s,
            "priority": request.priority,
            "cache_salt": request.cache_salt,
            "slo_class": request.slo_class,
            "traceparent": traceparent,
        }
        source = None if self._prefill is None else self._prefill.ref
        decode = DecodeRequest(prefill=source, after=after, **shared)
        legs: list[tuple[Worker, DecodeRequest | PrefillRequest]] = [(self._decode, decode)]
        if self._prefill is not None:  # first: the client waits for its token
            legs.insert(0, (self._prefill, PrefillRequest(decode=self._decode.ref, **shared)))
        try:
            for worker, message in legs:
                if not worker.send(message):
                    lost = WorkerLost(f"{worker.info.worker_id} takes no messages")
                    self._fail(lost, worker.info.worker_id, retryable=True)
                    return
        except MessageTooLarge as error:
            self._fail(error, "", retryable=False)

    def abort(self) -> None:
        """Free everything on both workers; nothing is delivered afterwards. Idempotent."""
        if self._state is _State.RUNNING:
            self._end(_State.ABORTED)
            self._abort_legs()

    def on_output(self, worker_id: str, output: TokenOutput) -> None:
        """A worker made tokens of this transfer."""
        if self._state is not _State.RUNNING:
            return
        if self._is_prefill(worker_id):
            self._on_first_token(worker_id, output)
            return
        self._decode_answered = True
        if self._prefill is None or self._next_index > self._base:
            self._deliver(worker_id, output)
        elif len(self._overtaking) < MAX_OVERTAKING_OUTPUTS:
            self._overtaking.append(output)
        else:
            missing = ProtocolError(f"output {self._base} is missing")
            self._fail(missing, self._workers[-1].info.worker_id, retryable=True)

    def on_failed(self, worker_id: str, failed: RequestFailed) -> None:
        """A worker gave up on this transfer and freed what it held."""
        if self._is_prefill(worker_id) and self._prefill_is_done():
            return
        error = error_from_code(failed.code, failed.message)
        if isinstance(error, IncompatiblePeer) and self._prefill is not None:
            self._cluster.note_incompatible(self._prefill, self._decode, failed.message)
        self._fail(error, worker_id, retryable=failed.retryable)

    def on_lost(self, worker_id: str, error: PdmeshError) -> None:
        """The link to a worker went down."""
        # After its token, what P still owes is the KV, and D is nearer to know whether that came:
        # D goes on, or fails this attempt.
        if self._is_prefill(worker_id) and self._next_index > self._base:
            return
        self._fail(error, worker_id, retryable=True)

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """The decode worker's, and the prefill worker's where there is one."""
        return tuple(worker.info.worker_id for worker in self._workers)

    @property
    def decode_worker(self) -> Worker:
        """Where the answer is made."""
        return self._decode

    def _is_prefill(self, worker_id: str) -> bool:
        return self._prefill is not None and worker_id == self._prefill.info.worker_id

    def _prefill_is_done(self) -> bool:
        return self._next_index > self._base and self._decode_answered

    def _on_first_token(self, worker_id: str, output: TokenOutput) -> None:
        if len(output.token_ids) != 1:
            wrong = ProtocolError(f"prefill made {len(output.token_ids)} tokens instead of one")
            self._fail(wrong, worker_id, retryable=True)
            return
        self._deliver(worker_id, output)
        overtaking, self._overtaking = self._overtaking, []
        for held in overtaking:
            if self._state is _State.RUNNING:
                self._deliver(self._decode.info.worker_id, held)

    def _deliver(self, worker_id: str, output: TokenOutput) -> None:
        if output.index != self._next_index or not output.token_ids:
            wrong = ProtocolError(f"output {output.index} came instead of {self._next_index}")
            self._fail(wrong, worker_id, retryable=True)
            return
        self._next_index += len(output.token_ids)
        if output.finish_reason is not None:
            self._end(_State.FINISHED)
        self._owner.on_tokens(output)

    def _fail(self, error: PdmeshError, worker_id: str, *, retryable: bool) -> None:
        if self._state is not _State.RUNNING:
            return
        self._end(_State.FAILED)
        self._abort_legs()
        avoid = {worker_id}
        if isinstance(error, TransferFailed):  # either side may be at fault
            avoid |= {worker.info.worker_id for worker in self._workers}
        self._owner.on_attempt_failed(error, avoid, retryable)

    def _end(self, state: _State) -> None:
        self._move(state)
        self._overtaking.clear()
        for worker in self._workers:
            self._cluster.detach(worker, self.transfer_id)

    def _abort_legs(self) -> None:
        # Also to the leg that failed: an abort is idempotent, and it may have failed only here.
        message = AbortRequest(request_id=self._request_id, transfer_id=self.transfer_id)
        for worker in self._workers:
            worker.send(message)

    def _move(self, state: _State) -> None:
        self._state = _TRANSITIONS.next(self._state, state)
