"""POST /v1/responses."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from gateway.endpoint import serve
from gateway.generation.answer import Answer
from gateway.generation.answer_factory import Prompt
from gateway.generation.choice import Delta
from gateway.generation.logprobs import TokenNames
from gateway.generation.parts import whole_parts
from gateway.prompts.chat import chat_tokens
from gateway.responses.events import ResponseEvents
from gateway.responses.input import responses_to_chat
from gateway.responses.response import ResponseObject
from gateway.responses.schema import decode_responses_request
from gateway.server_state import ServerState


async def responses(http_request: web.Request) -> web.StreamResponse:
    """Answer the next turn of a conversation that the client keeps."""
    return await serve(http_request, ResponsesDialect)


class ResponsesDialect:
    """The ``Dialect`` of the Responses API."""

    def __init__(self, body: bytes) -> None:
        self._asked = decode_responses_request(body)
        self.request, self.names = responses_to_chat(self._asked)

    async def prompts(self, server: ServerState) -> list[Prompt]:
        """The conversation."""
        return [Prompt(tuple(await chat_tokens(server.model, server.text_threads, self.request)))]

    def chunks(self, server: ServerState, answer: Answer) -> ResponseEvents:
        """Events of output items."""
        return ResponseEvents(self._response(server, answer))

    def whole(
        self, server: ServerState, answer: Answer, deltas: list[list[Delta]]
    ) -> dict[str, Any]:
        """A ``response``."""
        return self._response(server, answer).finished(whole_parts(deltas[0]))

    def _response(self, server: ServerState, answer: Answer) -> ResponseObject:
        return ResponseObject(
            self._asked,
            answer,
            model=server.model.name,
            names=TokenNames(server.model.tokenizer),
        )
