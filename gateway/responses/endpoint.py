"""POST /v1/responses."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from gateway.agent_endpoint import AgentEndpoint
from gateway.generation.answer import Answer, Prompt
from gateway.generation.logprobs import TokenNames
from gateway.generation.parts import Part
from gateway.prompts.chat import chat_tokens
from gateway.request.schema import ChatRequest
from gateway.responses.events import ResponseEvents
from gateway.responses.input import responses_to_chat
from gateway.responses.response import ResponseObject
from gateway.responses.schema import ResponsesRequest, decode_responses_request
from gateway.server_state import ServerState


async def responses(http_request: web.Request) -> web.StreamResponse:
    """Answer the next turn of a conversation that the client keeps."""
    return await ResponsesEndpoint().serve(http_request)


class ResponsesEndpoint(AgentEndpoint):
    """A chat request in the Responses API's form."""

    _request: ResponsesRequest

    def decode(self, body: bytes) -> ChatRequest:
        """See ``Endpoint``."""
        self._request = decode_responses_request(body)
        chat, self.names = responses_to_chat(self._request)
        return chat

    async def prompts(self, server: ServerState, request: ChatRequest) -> list[Prompt]:
        """See ``Endpoint``."""
        return [Prompt(tuple(await chat_tokens(server.model, server.text_threads, request)))]

    def chunks(self, server: ServerState, request: ChatRequest, answer: Answer) -> ResponseEvents:
        """See ``Endpoint``."""
        return ResponseEvents(self._response(server, answer))

    def body(self, server: ServerState, answer: Answer, parts: list[Part]) -> dict[str, Any]:
        """See ``AgentEndpoint``."""
        return self._response(server, answer).finished(parts)

    def _response(self, server: ServerState, answer: Answer) -> ResponseObject:
        return ResponseObject(
            self._request,
            answer,
            model=server.model.name,
            names=TokenNames(server.model.tokenizer),
        )
