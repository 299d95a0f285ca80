"""What the generating endpoints do alike: from an HTTP body to the answer."""

from __future__ import annotations

import time
from typing import Any, Generic, TypeVar

import orjson
from aiohttp import web

from gateway.answer import Answer, Prompt, stream_answer
from gateway.choice import Delta
from gateway.client_writer import send_json
from gateway.errors import SlowReader
from gateway.frontend import FRONTEND, Frontend
from gateway.output_rules import output_rules
from gateway.request_body import read_body
from gateway.request_metrics import count_failure
from gateway.schema import ChatRequest, CompletionRequest
from gateway.sse import Chunks
from mesh.errors import InvalidRequest

RequestType = TypeVar("RequestType", ChatRequest, CompletionRequest)


class Endpoint(Generic[RequestType]):
    """One generating endpoint, for one HTTP request; subclasses fill in what differs.

    Whatever a client's body looks like, what runs is a chat or a completion request.
    """

    def decode(self, body: bytes) -> RequestType:
        """Decode and validate the body."""
        raise NotImplementedError

    async def prompts(self, frontend: Frontend, request: RequestType) -> list[Prompt]:
        """Tokenise the request's prompts."""
        raise NotImplementedError

    def chunks(self, frontend: Frontend, request: RequestType, answer: Answer) -> Chunks:
        """Formats the events of a streamed answer."""
        raise NotImplementedError

    def whole(
        self,
        frontend: Frontend,
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
        frontend = http_request.app[FRONTEND]
        request = self.decode(await read_body(http_request, frontend))
        frontend.check_model(request.model)
        with frontend.admitted():
            try:
                return await self._run(http_request, frontend, request, arrived_s)
            except InvalidRequest as error:
                self.rename(error)
                raise

    async def _run(
        self,
        http_request: web.Request,
        frontend: Frontend,
        request: RequestType,
        arrived_s: float,
    ) -> web.StreamResponse:
        rules = output_rules(request, frontend.model)
        if rules.grammar:
            await frontend.grammars.check(rules.grammar, rules.param)
        prompts = await self.prompts(frontend, request)
        answer = Answer(
            frontend,
            request,
            prompts,
            rules=rules,
            arrived_s=arrived_s,
            on_slow_reader=lambda: _break_connection(http_request),
        )
        with answer:
            if request.stream:
                chunks = self.chunks(frontend, request, answer)
                return await stream_answer(http_request, answer, chunks, request)
            deltas = await answer.collect()
            body = self.whole(frontend, request, answer, deltas)
            return await send_json(http_request, orjson.dumps(body))


def _break_connection(http_request: web.Request) -> None:
    """Cancels the handler, which may hang in a write that this client never takes."""
    transport = http_request.transport
    if transport is not None and not transport.is_closing():
        count_failure(SlowReader.code)
        transport.abort()
