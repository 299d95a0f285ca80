"""What all handlers of one gateway share: the model, the cluster, the limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from aiohttp import web

from gateway.observe.history import History
from gateway.prompts.served_model import ServedModel
from gateway.prompts.text_threads import TextThreads
from gateway.routing.cluster import Cluster
from gateway.structured.grammar_check import GrammarChecker
from mesh.errors import ModelNotFound, Overloaded, PdmeshError, Unavailable
from mesh.telemetry import metrics
from mesh.telemetry.tracing import Tracing

MAX_OPEN_REQUESTS = 4096
MAX_RECEIVING_BYTES = 512 << 20
"""Bodies on their way in, all together."""

_OPEN_REQUESTS = metrics.gauge("pdmesh:gateway_open_requests", "HTTP requests being served.")


class RunningAnswer(Protocol):
    """What ``ServerState.drain`` needs of an answer."""

    def fail(self, error: PdmeshError) -> None:
        """End it now; its client is told ``error``."""


class ServerState:
    """State of one gateway process; ``close()`` frees its threads."""

    def __init__(
        self,
        *,
        model: ServedModel,
        cluster: Cluster,
        request_timeout_s: float,
        max_body_bytes: int,
        tracing: Tracing | None = None,
        history: History | None = None,
    ) -> None:
        """Args are those of ``mesh.config.GatewayConfig``; ``tracing`` is borrowed."""
        self.model = model
        self.cluster = cluster
        self.request_timeout_s = request_timeout_s
        self.max_body_bytes = max_body_bytes
        self.tracing = tracing
        self.history = history or History()
        self.grammars = GrammarChecker(model.tokenizer)
        self.text_threads = TextThreads()
        self.created = int(time.time())
        self.num_open_requests = 0
        self.receiving_bytes = 0
        """Room held for bodies that are on their way in."""
        self.is_draining = False
        """Set at shutdown: requests that run may finish, new ones are refused, /ready says no."""
        self.running: set[RunningAnswer] = set()
        """Answers that have been started and not left."""
        self._idle = asyncio.Event()
        self._idle.set()

    def close(self) -> None:
        """Stop the threads."""
        self.grammars.close()
        self.text_threads.close()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, wait for those that run, and fail what still runs then."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            for answer in list(self.running):
                answer.fail(Unavailable("the gateway is shutting down"))

    @property
    def max_model_len(self) -> int:
        """Longest sequence that can be served now."""
        return self.cluster.max_model_len or self.model.max_model_len

    def can_serve(self) -> bool:
        """Whether a request could be served now."""
        return not self.is_draining and self.cluster.can_serve()

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served; a request may leave the name out.

        Raises:
            ModelNotFound: another model.
        """
        if name is not None and name != self.model.name:
            raise ModelNotFound(f"the model {name!r} does not exist", param="model")

    @contextmanager
    def admitted(self, *, needs_workers: bool = True) -> Iterator[None]:
        """Hold one of the places for requests.

        Raises:
            Overloaded: none is free.
            Unavailable: no workers, where they are needed, or the gateway is shutting down.
        """
        if self.is_draining:
            raise Unavailable("the gateway is shutting down")
        if self.num_open_requests >= MAX_OPEN_REQUESTS:
            raise Overloaded(f"{MAX_OPEN_REQUESTS} requests are open already")
        if needs_workers and not self.cluster.can_serve():
            raise Unavailable("no matching pair of a prefill and a decode worker is up")
        self.num_open_requests += 1
        self._idle.clear()
        _OPEN_REQUESTS.set(self.num_open_requests)
        try:
            yield
        finally:
            self.num_open_requests -= 1
            if self.num_open_requests == 0:
                self._idle.set()
            _OPEN_REQUESTS.set(self.num_open_requests)

    @contextmanager
    def serving(self, answer: RunningAnswer) -> Iterator[None]:
        """Let ``drain`` end ``answer`` if it runs for too long."""
        self.running.add(answer)
        try:
            yield
        finally:
            self.running.discard(answer)

    @contextmanager
    def receiving(self, num_bytes: int) -> Iterator[None]:
        """Hold room for a body while it arrives, so that slow senders cannot fill the memory.

        Raises:
            Overloaded: there is none.
        """
        if self.receiving_bytes and self.receiving_bytes + num_bytes > MAX_RECEIVING_BYTES:
            raise Overloaded("too many bodies are on their way in")
        self.receiving_bytes += num_bytes
        try:
            yield
        finally:
            self.receiving_bytes -= num_bytes


SERVER_STATE: web.AppKey[ServerState] = web.AppKey("server_state", ServerState)
