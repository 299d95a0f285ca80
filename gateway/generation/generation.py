"""The life of one output sequence, over as many attempts as it takes.

    start ──> attempt ── tokens ──> pending ── take() ──> the answer
                │ ↑                    │ over the limit: the reader is too slow ──> error
                │ └── another pair, prompt + tokens so far, a new transfer id
                └── attempts, deadline or workers used up ──> error

It works by callbacks in the event loop: no task, and one wake-up for any number of tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gateway.errors import SlowReader
from gateway.generation.attempt import Attempt
from gateway.generation.generation_request import GenerationRequest
from gateway.observe.request_metrics import RequestMetrics
from gateway.observe.request_trace import RequestTrace
from gateway.routing.cluster import Cluster, Worker
from gateway.routing.router import Need
from mesh.errors import DeadlineExceeded, Overloaded, PdmeshError, Unavailable
from mesh.messages import TokenOutput
from mesh.telemetry import metrics
from mesh.telemetry.log_format import about

MAX_ATTEMPTS = 4
MAX_PENDING_TOKENS = 2048
"""Tokens kept for a client that does not read; then its request is dropped."""

RETRY_WAIT_S = 15.0
"""How long a started request waits for a pair of workers to come back."""

_RETRY_DELAY_S = 0.05
_POLL_S = 0.1

_logger = logging.getLogger(__name__)
_RETRIES = metrics.counter(
    "pdmesh:gateway_retries", "Attempts that failed and were followed by another.", ["code"]
)


class Generation:
    """Owns the attempts of one sequence; ``close()`` frees everything on the workers."""

    def __init__(
        self,
        cluster: Cluster,
        request: GenerationRequest,
        *,
        request_metrics: RequestMetrics,
        on_ready: Callable[[], None],
        on_slow_reader: Callable[[], None],
        sibling: Generation | None = None,
        trace: RequestTrace | None = None,
    ) -> None:
        """Prepare; ``start`` sends it.

        Args:
            cluster: Where to run it.
            request: What to run.
            request_metrics: Hears about every token.
            on_ready: Called when ``take()`` or ``error`` has something new.
            on_slow_reader: Called once when the reader fell too far behind.
            sibling: Another sample of the same prompt, started before: this one runs where that one
                does and reuses its prompt's KV, unless that attempt is over already.
            trace: Where the attempts' spans go.
        """
        self.request = request
        self.error: PdmeshError | None = None
        """Set when the sequence ended without a last token."""
        self.num_cached_tokens = 0
        self.attempt: Attempt | None = None
        """The one that runs, or ran last without failing."""
        self._cluster = cluster
        self._metrics = request_metrics
        self._on_ready = on_ready
        self._on_slow_reader = on_slow_reader
        self._sibling = sibling
        self._trace = trace
        self._loop = asyncio.get_running_loop()
        self._pending: list[TokenOutput] = []
        self._num_pending_tokens = 0
        self._output_ids: list[int] = []
        self._num_attempts = 0
        self._avoid: set[str] = set()
        self._ended = False
        self._give_up_at_s = 0.0
        self._retry_timer: asyncio.TimerHandle | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Send the first attempt.

        Raises:
            Unavailable, Overloaded, ContextTooLong: nothing was sent.
        """
        self._deadline_timer = self._loop.call_at(self.request.deadline_s, self._expire)
        try:
            self._start_attempt()
        except PdmeshError:
            self.close()
            raise

    def close(self) -> None:
        """Stop: abort what still runs on the workers. Idempotent."""
        self._ended = True
        for timer in (self._retry_timer, self._deadline_timer):
            if timer is not None:
                timer.cancel()
        if self.attempt is not None:
            self.attempt.abort()
        if self._trace is not None:
            self._trace.on_attempt_ended(
                self.request.request_id, "" if self.error is None else self.error.code
            )

    def fail(self, error: PdmeshError) -> None:
        """Stop with ``error``, unless it is over already."""
        if not self._ended:
            self._end(error)

    def take(self) -> list[TokenOutput]:
        """The outputs since the last call, in order."""
        taken, self._pending = self._pending, []
        self._num_pending_tokens = 0
        return taken

    def on_tokens(self, output: TokenOutput) -> None:
        """The attempt made the next tokens."""
        if self._ended:
            return
        if output.num_cached_tokens and not self._output_ids:
            self.num_cached_tokens = min(output.num_cached_tokens, len(self.request.prompt_ids))
        num_new = len(output.token_ids)
        self._output_ids += output.token_ids
        self._pending.append(output)
        self._num_pending_tokens += num_new
        self._metrics.on_tokens(num_new, output.timing)
        if output.finish_reason is not None:
            self.close()
        elif self._num_pending_tokens > MAX_PENDING_TOKENS:
            self._end(SlowReader("the client reads slower than the answer is made"))
            self._on_slow_reader()
            return
        self._on_ready()

    def on_attempt_failed(self, error: PdmeshError, avoid: set[str], retryable: bool) -> None:
        """The attempt is over without a last token."""
        if self._ended:
            return
        self.attempt = None
        self._metrics.on_attempt_failed()
        if self._trace is not None:
            self._trace.on_attempt_ended(self.request.request_id, error.code)
        now_s = self._loop.time()
        if not retryable or self._num_attempts >= MAX_ATTEMPTS or now_s >= self.request.deadline_s:
            self._end(error)
            return
        _RETRIES.labels(code=error.code).inc()
        _logger.warning(
            "retry attempt=%d avoid=%s %s",
            self._num_attempts,
            ",".join(sorted(avoid)),
            error,
            extra=about(self.request.request_id, code=error.code),
        )
        self._avoid |= avoid
        self._give_up_at_s = min(now_s + RETRY_WAIT_S, self.request.deadline_s)
        # Not at once: a refusal would answer within this turn, and we would run in circles.
        delay_s = _RETRY_DELAY_S * self._num_attempts if isinstance(error, Overloaded) else 0.0
        self._retry_timer = self._loop.call_later(delay_s, self._retry)

    def _retry(self) -> None:
        if self._ended:
            return
        try:
            self._start_attempt()
        except (Unavailable, Overloaded) as error:
            if self._loop.time() + _POLL_S >= self._give_up_at_s:
                self._end(error)
            else:
                self._retry_timer = self._loop.call_later(_POLL_S, self._retry)
        except PdmeshError as error:
            self._end(error)

    def _start_attempt(self) -> None:
        request = self.request
        token_ids = (*request.prompt_ids, *self._output_ids)
        total = len(request.prompt_ids) + request.sampling.max_tokens
        first = self._sibling.attempt if self._sibling and not self._num_attempts else None
        prefill: Worker | None = None
        if first is not None:
            decode = first.decode_worker
        else:
            prefill, decode = self._cluster.choose(Need(len(token_ids), total), self._avoid)
        self._num_attempts += 1
        attempt = Attempt(
            self._cluster, self, prefill=prefill, decode=decode, base=len(self._output_ids)
        )
        self.attempt = attempt
        self._metrics.on_attempt(attempt.worker_ids, request.sampling)
        traceparent = ""
        if self._trace is not None:
            traceparent = self._trace.on_attempt(
                request.request_id, attempt.worker_ids, self._num_attempts
            )
        if _logger.isEnabledFor(logging.DEBUG):
            ids = about(request.request_id, transfer_id=attempt.transfer_id)
            _logger.debug("attempt workers=%s", ",".join(attempt.worker_ids), extra=ids)
        attempt.start(
            request,
            token_ids=token_ids,
            ttl_s=max(0.001, request.deadline_s - self._loop.time()),
            after="" if first is None else first.transfer_id,
            traceparent=traceparent,
        )

    def _expire(self) -> None:
        self.fail(DeadlineExceeded("the request's deadline passed before it finished"))

    def _end(self, error: PdmeshError) -> None:
        self.error = error
        ids = about(self.request.request_id, code=error.code)
        _logger.info("failed after tokens=%d", len(self._output_ids), extra=ids)
        self.close()
        self._on_ready()
