"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from gateway.agent_endpoint import AgentEndpoint
from gateway.anthropic.input import messages_to_chat
from gateway.anthropic.message import MessageEvents, MessageObject
from gateway.anthropic.schema import (
    MessagesRequest,
    decode_count_tokens_request,
    decode_messages_request,
)
from gateway.client_writer import send_json
from gateway.generation.answer import Answer, Prompt
from gateway.generation.parts import Part
from gateway.prompts.chat import chat_tokens
from gateway.request.schema import ChatRequest
from gateway.request_body import read_body
from gateway.server_state import SERVER_STATE, ServerState
from mesh.errors import InvalidRequest

PATH = "/v1/messages"
"""Also the beginning of all paths of this API."""


async def messages(http_request: web.Request) -> web.StreamResponse:
    """Answer the next turn of a conversation."""
    return await MessagesEndpoint().serve(http_request)


async def count_tokens(http_request: web.Request) -> web.StreamResponse:
    """Number of tokens of the prompt that a conversation makes; needs no workers."""
    server = http_request.app[SERVER_STATE]
    with server.admitted(needs_workers=False):
        request = decode_count_tokens_request(await read_body(http_request, server))
        server.check_model(request.model)
        chat, names = messages_to_chat(request)
        try:
            ids = await chat_tokens(server.model, server.text_threads, chat)
        except InvalidRequest as error:
            names.rename(error)
            raise
        return await send_json(http_request, orjson.dumps({"input_tokens": len(ids)}))


class MessagesEndpoint(AgentEndpoint):
    """A chat request in the Messages API's form."""

    _request: MessagesRequest

    def decode(self, body: bytes) -> ChatRequest:
        """See ``Endpoint``."""
        self._request = decode_messages_request(body)
        chat, self.names = messages_to_chat(self._request)
        return chat

    async def prompts(self, server: ServerState, request: ChatRequest) -> list[Prompt]:
        """See ``Endpoint``; an output longer than the context ends where the context does."""
        ids = await chat_tokens(server.model, server.text_threads, request)
        room = server.max_model_len - len(ids)
        request.max_tokens = min(self._request.max_tokens, max(1, room))
        return [Prompt(tuple(ids))]

    def chunks(self, server: ServerState, request: ChatRequest, answer: Answer) -> MessageEvents:
        """See ``Endpoint``."""
        return MessageEvents(self._message(server, answer))

    def body(self, server: ServerState, answer: Answer, parts: list[Part]) -> dict[str, Any]:
        """See ``AgentEndpoint``."""
        return self._message(server, answer).whole(parts)

    def _message(self, server: ServerState, answer: Answer) -> MessageObject:
        return MessageObject(answer, model=server.model.name, max_tokens=self._request.max_tokens)
