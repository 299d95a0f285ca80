"""What the two generating endpoints do alike: from an HTTP body to the answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import orjson
from aiohttp import web

from gateway.answer import Answer, Prompt, stream_answer
from gateway.choice import Delta
from gateway.errors import PayloadTooLarge, SlowReader
from gateway.frontend import FRONTEND, Frontend
from gateway.output_rules import output_rules
from gateway.request_metrics import count_failure
from gateway.schema import ChatRequest, CompletionRequest
from gateway.sse import Chunks, Stream
from gateway.usage import usage

_Request = TypeVar("_Request", ChatRequest, CompletionRequest)


class Endpoint(Generic[_Request]):
    """One generating endpoint; subclasses fill in what differs."""

    id_prefix: str
    object_name: str
    chunks: Callable[[Stream], Chunks]

    def decode(self, body: bytes) -> _Request:
        """Decode and validate the body."""
        raise NotImplementedError

    async def prompts(self, frontend: Frontend, request: _Request) -> list[Prompt]:
        """Tokenise the request's prompts."""
        raise NotImplementedError

    def choice(
        self, frontend: Frontend, answer: Answer, index: int, deltas: list[Delta]
    ) -> dict[str, Any]:
        """One item of ``choices`` of a whole answer."""
        raise NotImplementedError

    def put_prompt_ids(self, body: dict[str, Any], answer: Answer) -> None:
        """Add ``prompt_token_ids`` where vLLM has them for this endpoint."""
        raise NotImplementedError

    async def serve(self, http_request: web.Request) -> web.StreamResponse:
        """Run the request and answer it.

        Raises:
            PdmeshError: it failed before the first byte of the answer.
        """
        arrived_s = time.monotonic()
        frontend = http_request.app[FRONTEND]
        request = self.decode(await _read_body(http_request, frontend))
        frontend.check_model(request.model)
        with frontend.admitted():
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
                    return await self._stream(http_request, frontend, request, answer)
                return await self._whole(frontend, request, answer)

    async def _stream(
        self, http_request: web.Request, frontend: Frontend, request: _Request, answer: Answer
    ) -> web.StreamResponse:
        options = request.stream_options
        chunks = self.chunks(
            Stream(
                answer_id=self.id_prefix + answer.id,
                created=answer.created,
                model=frontend.model.name,
                with_usage=bool(options and options.include_usage),
                with_ids=request.return_token_ids,
                tokenizer=frontend.model.tokenizer,
            )
        )
        return await stream_answer(http_request, answer, chunks, request)

    async def _whole(self, frontend: Frontend, request: _Request, answer: Answer) -> web.Response:
        deltas = await answer.collect()
        choices = [
            self.choice(frontend, answer, index, of_choice)
            for index, of_choice in enumerate(deltas)
        ]
        if request.return_token_ids:
            for choice, of_choice in zip(choices, deltas, strict=True):
                choice["token_ids"] = [delta.token_id for delta in of_choice]
        body: dict[str, Any] = {
            "id": self.id_prefix + answer.id,
            "object": self.object_name,
            "created": answer.created,
            "model": frontend.model.name,
            "choices": choices,
            "usage": usage(answer.choices, answer.samples_per_prompt),
        }
        if request.return_token_ids:
            self.put_prompt_ids(body, answer)
        return web.Response(body=orjson.dumps(body), content_type="application/json")


async def _read_body(http_request: web.Request, frontend: Frontend) -> bytes:
    try:
        return await http_request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise PayloadTooLarge(f"the body is over {frontend.max_body_bytes} bytes") from error


def _break_connection(http_request: web.Request) -> None:
    """Cancels the handler, which may hang in a write that this client never takes."""
    transport = http_request.transport
    if transport is not None and not transport.is_closing():
        count_failure(SlowReader.code)
        transport.abort()
