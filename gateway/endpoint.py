"""What the generating endpoints do alike: from an HTTP body to the answer."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import orjson
from aiohttp import web

from gateway.client_writer import send_json
from gateway.errors import SlowReader
from gateway.generation.answer import Answer
from gateway.generation.answer_factory import AnswerFactory, Prompt
from gateway.generation.choice import Delta
from gateway.generation.output_rules import output_rules
from gateway.observe.request_metrics import count_failure
from gateway.observe.request_trace import RequestTrace
from gateway.observe.timeline import Arrival
from gateway.prompts.conversation import FieldNames
from gateway.request.schema import ChatRequest, CompletionRequest
from gateway.request_body import read_body
from gateway.request_ids import ANSWER_ID, client_request_id
from gateway.server_state import SERVER_STATE, ServerState
from gateway.sse import Chunks, stream_answer
from mesh.telemetry.log_format import about

TIMING_HEADER = "X-Pdmesh-Timing"
"""``1`` asks for ``pdmesh_timing`` in the answer."""

_logger = logging.getLogger(__name__)


class Dialect(Protocol):
    """One request as its API asks it, and how that API writes the answer.

    Whatever a client's body looks like, what runs is a chat or a completion request.
    """

    names: FieldNames
    """What the client calls the fields of what runs."""

    @property
    def request(self) -> ChatRequest | CompletionRequest:
        """What runs."""
        ...

    async def prompts(self, server: ServerState) -> list[Prompt]:
        """Tokenise the request's prompts."""
        ...

    def chunks(self, server: ServerState, answer: Answer) -> Chunks:
        """Formats the events of a streamed answer."""
        ...

    def whole(
        self, server: ServerState, answer: Answer, deltas: list[list[Delta]]
    ) -> dict[str, Any]:
        """The body of a whole answer; ``deltas`` are all those of each choice."""
        ...


async def serve(
    http_request: web.Request, decode: Callable[[bytes], Dialect]
) -> web.StreamResponse:
    """Run the request in the body and answer it.

    Raises:
        PdmeshError: it failed before the first byte of the answer.
    """
    arrived_s = time.monotonic()
    server = http_request.app[SERVER_STATE]
    with _traced(http_request, server, arrived_s) as trace:
        dialect = decode(await read_body(http_request, server))
        request = dialect.request
        server.check_model(request.model)
        with server.admitted(), dialect.names.renamed():
            rules = output_rules(request, server.model)
            if rules.grammar:
                await server.grammars.check(rules.grammar, rules.param)
            decoded_s = time.monotonic()
            prompts = await dialect.prompts(server)
            arrival = Arrival(arrived_s, decoded_s, time.monotonic())
            answer = AnswerFactory(
                server,
                request,
                rules=rules,
                arrival=arrival,
                on_slow_reader=functools.partial(_break_connection, http_request),
                trace=trace,
            ).build(prompts, shows_timing=http_request.headers.get(TIMING_HEADER) == "1")
            _note(http_request, answer, arrival, trace)
            with answer, server.serving(answer):
                if request.stream:
                    chunks = dialect.chunks(server, answer)
                    return await stream_answer(http_request, answer, chunks, request)
                body = dialect.whole(server, answer, await answer.collect())
                return await send_json(http_request, orjson.dumps(body))


def _traced(
    http_request: web.Request, server: ServerState, arrived_s: float
) -> AbstractContextManager[RequestTrace | None]:
    if server.tracing is None:
        return nullcontext()
    parent = http_request.headers.get("traceparent", "")
    return RequestTrace(server.tracing, http_request.path, parent, arrived_s)


def _note(
    http_request: web.Request, answer: Answer, arrival: Arrival, trace: RequestTrace | None
) -> None:
    """Have the request found by its ids in head, log and trace."""
    http_request[ANSWER_ID] = answer.id
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
