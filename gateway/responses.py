"""POST /v1/responses."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from gateway.answer import Answer, Prompt
from gateway.answer_parts import AnswerParts
from gateway.chat import chat_tokens
from gateway.choice import Delta
from gateway.conversation import FieldNames
from gateway.endpoint import Endpoint
from gateway.frontend import Frontend
from gateway.logprobs import TokenNames
from gateway.response_object import ResponseObject
from gateway.responses_events import ResponseEvents
from gateway.responses_input import responses_to_chat
from gateway.responses_schema import ResponsesRequest, decode_responses_request
from gateway.schema import ChatRequest
from mesh.errors import InvalidRequest


async def responses(http_request: web.Request) -> web.StreamResponse:
    """Answer the next turn of a conversation that the client keeps."""
    return await ResponsesEndpoint().serve(http_request)


class ResponsesEndpoint(Endpoint[ChatRequest]):
    """A chat request in the Responses API's form."""

    _request: ResponsesRequest
    _names: FieldNames

    def decode(self, body: bytes) -> ChatRequest:
        """See ``Endpoint``."""
        self._request = decode_responses_request(body)
        chat, self._names = responses_to_chat(self._request)
        return chat

    async def prompts(self, frontend: Frontend, request: ChatRequest) -> list[Prompt]:
        """See ``Endpoint``."""
        return [Prompt(tuple(await chat_tokens(frontend, request)))]

    def chunks(self, frontend: Frontend, request: ChatRequest, answer: Answer) -> ResponseEvents:
        """See ``Endpoint``."""
        return ResponseEvents(self._response(frontend, answer))

    def whole(
        self,
        frontend: Frontend,
        request: ChatRequest,
        answer: Answer,
        deltas: list[list[Delta]],
    ) -> dict[str, Any]:
        """See ``Endpoint``."""
        parts = AnswerParts()
        for delta in deltas[0]:
            parts.add(delta)
        return self._response(frontend, answer).finished(parts.parts)

    def rename(self, error: InvalidRequest) -> None:
        """See ``Endpoint``."""
        self._names.rename(error)

    def _response(self, frontend: Frontend, answer: Answer) -> ResponseObject:
        return ResponseObject(
            self._request,
            answer,
            model=frontend.model.name,
            names=TokenNames(frontend.model.tokenizer),
        )
