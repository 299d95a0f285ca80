"""What the generating endpoints do alike: from an HTTP body to the answer."""

from __future__ import annotations

import logging
import time
from typing import Any, Generic, TypeVar

import orjson
from aiohttp import web

from gateway.client_writer import send_json
from gateway.errors import SlowReader
from gateway.generation.answer import Answer, Prompt, stream_answer
from gateway.generation.choice import Delta
from gateway.generation.output_rules import output_rules
from gateway.observe.request_metrics import count_failure
from gateway.observe.request_trace import RequestTrace
from gateway.observe.timeline import Arrival
from gateway.request.schema import ChatRequest, CompletionRequest
from gateway.request_body import read_body
from gateway.request_ids import ANSWER_ID, client_request_id
from gateway.server_state import SERVER_STATE, ServerState
from gateway.sse import Chunks
from mesh.errors import InvalidRequest
from mesh.log_format import about

TIMING_HEADER = "X-Pdmesh-Timing"
"""``1`` asks for ``pdmesh_timing`` in the answer."""

RequestType = TypeVar("RequestType", ChatRequest, CompletionRequest)

_logger = logging.getLogger(__name__)


class Endpoint(Generic[RequestType]):
    """One generating endpoint, for one HTTP request; subclasses fill in what differs.

    Whatever a client's body looks like, what runs is a chat or a completion request.
    """

    def decode(self, body: bytes) -> RequestType:
        """Decode and validate the body."""
        raise NotImplementedError

    async def prompts(self, server: ServerState, request: RequestType) -> list[Prompt]:
        """Tokenise the request's prompts."""
        raise NotImplementedError

    def chunks(self, server: ServerState, request: RequestType, answer: Answer) -> Chunks:
        """Formats the events of a streamed answer."""
        raise NotImplementedError

    def whole(
        self,
        server: ServerState,
        request: RequestType,
        answer: Answer,
        deltas: list[list[Delta]],
    ) -> dict[str, Any]:
        """The body of a whole answer; ``deltas`` are all those of each choice."""
        raise NotImplementedError

    def rename(self, error: InvalidRequest) -> None:
        """Make ``error`` name the fields as this endpoint's clients know them."""

    async def serve(self, http_request: web.Request) -> web.StreamResponse:
        """Run the request and answer it.

        Raises:
            PdmeshError: it failed before the first byte of the answer.
        """
        arrived_s = time.monotonic()
        server = http_request.app[SERVER_STATE]
        if server.tracing is None:
            return await self._serve(http_request, server, arrived_s, None)
        parent = http_request.headers.get("traceparent", "")
        with RequestTrace(server.tracing, http_request.path, parent, arrived_s) as trace:
            return await self._serve(http_request, server, arrived_s, trace)

    async def _serve(
        self,
        http_request: web.Request,
        server: ServerState,
        arrived_s: float,
        trace: RequestTrace | None,
    ) -> web.StreamResponse:
        request = self.decode(await read_body(http_request, server))
        server.check_model(request.model)
        with server.admitted():
            try:
                return await self._run(http_request, server, request, arrived_s, trace)
            except InvalidRequest as error:
                self.rename(error)
                raise

    async def _run(
        self,
        http_request: web.Request,
        server: ServerState,
        request: RequestType,
        arrived_s: float,
        trace: RequestTrace | None,
    ) -> web.StreamResponse:
        rules = output_rules(request, server.model)
        if rules.grammar:
            await server.grammars.check(rules.grammar, rules.param)
        decoded_s = time.monotonic()
        prompts = await self.prompts(server, request)
        arrival = Arrival(arrived_s, decoded_s, time.monotonic())
        answer = Answer(
            server,
            request,
            prompts,
            rules=rules,
            arrived_s=arrived_s,
            on_slow_reader=lambda: _break_connection(http_request),
            arrival=arrival,
            shows_timing=http_request.headers.get(TIMING_HEADER) == "1",
            trace=trace,
        )
        http_request[ANSWER_ID] = answer.id
        _note(http_request, answer, arrival, trace)
        with answer:
            if request.stream:
                chunks = self.chunks(server, request, answer)
                return await stream_answer(http_request, answer, chunks, request)
            deltas = await answer.collect()
            body = self.whole(server, request, answer, deltas)
            return await send_json(http_request, orjson.dumps(body))


def _note(
    http_request: web.Request, answer: Answer, arrival: Arrival, trace: RequestTrace | None
) -> None:
    """Have the request found by its ids in log and trace."""
    client_id = client_request_id(http_request)
    prompts = answer.choices[:: answer.samples_per_prompt]
    num_tokens = sum(len(choice.generation.request.prompt_ids) for choice in prompts)
    if _logger.isEnabledFor(logging.DEBUG):
        ids = about(answer.id, client_request_id=client_id)
        _logger.debug("request path=%s prompt_tokens=%d", http_request.path, num_tokens, extra=ids)
    if trace is not None:
        trace.tokenised(arrival, num_tokens)
        trace.describe({"pdmesh.request_id": answer.id, "pdmesh.client_request_id": client_id})


def _break_connection(http_request: web.Request) -> None:
    """Cancels the handler, which may hang in a write that this client never takes."""
    transport = http_request.transport
    if transport is not None and not transport.is_closing():
        count_failure(SlowReader.code)
        transport.abort()
