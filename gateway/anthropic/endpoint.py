"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from gateway.anthropic.input import messages_to_chat
from gateway.anthropic.message import MessageEvents, MessageObject
from gateway.anthropic.schema import decode_count_tokens_request, decode_messages_request
from gateway.client_writer import send_json
from gateway.endpoint import serve
from gateway.generation.answer import Answer
from gateway.generation.answer_factory import Prompt
from gateway.generation.choice import Delta
from gateway.generation.parts import whole_parts
from gateway.prompts.chat import chat_tokens
from gateway.request_body import read_body
from gateway.server_state import SERVER_STATE, ServerState

PATH = "/v1/messages"
"""Also the beginning of all paths of this API."""


async def messages(http_request: web.Request) -> web.StreamResponse:
    """Answer the next turn of a conversation."""
    return await serve(http_request, MessagesDialect)


async def count_tokens(http_request: web.Request) -> web.StreamResponse:
    """Number of tokens of the prompt that a conversation makes; needs no workers."""
    server = http_request.app[SERVER_STATE]
    with server.admitted(needs_workers=False):
        request = decode_count_tokens_request(await read_body(http_request, server))
        server.check_model(request.model)
        chat, names = messages_to_chat(request)
        with names.renamed():
            ids = await chat_tokens(server.model, server.text_threads, chat)
        return await send_json(http_request, orjson.dumps({"input_tokens": len(ids)}))


class MessagesDialect:
    """The ``Dialect`` of the Messages API."""

    def __init__(self, body: bytes) -> None:
        self._asked = decode_messages_request(body)
        self.request, self.names = messages_to_chat(self._asked)

    async def prompts(self, server: ServerState) -> list[Prompt]:
        """The conversation; an output longer than the context ends where the context does."""
        ids = await chat_tokens(server.model, server.text_threads, self.request)
        room = server.max_model_len - len(ids)
        self.request.max_tokens = min(self._asked.max_tokens, max(1, room))
        return [Prompt(tuple(ids))]

    def chunks(self, server: ServerState, answer: Answer) -> MessageEvents:
        """Events of content blocks."""
        return MessageEvents(self._message(server, answer))

    def whole(
        self, server: ServerState, answer: Answer, deltas: list[list[Delta]]
    ) -> dict[str, Any]:
        """A ``message``."""
        return self._message(server, answer).whole(whole_parts(deltas[0]))

    def _message(self, server: ServerState, answer: Answer) -> MessageObject:
        return MessageObject(answer, model=server.model.name, max_tokens=self._asked.max_tokens)
