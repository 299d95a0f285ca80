"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from gateway.generation.answer import Prompt
from gateway.generation.choice import Choice, Delta
from gateway.generation.logprobs import TokenNames, chat_logprobs
from gateway.openai.choices import ChoicesEndpoint
from gateway.openai.tool_calls import joined_calls
from gateway.prompts.chat import chat_tokens
from gateway.prompts.token_ids import truncated
from gateway.request.decoding import decode_chat_request
from gateway.request.schema import ChatRequest
from gateway.server_state import ServerState
from gateway.sse import ChatChunks


async def chat_completions(http_request: web.Request) -> web.StreamResponse:
    """Answer the next turn of a conversation."""
    return await ChatEndpoint().serve(http_request)


class ChatEndpoint(ChoicesEndpoint[ChatRequest]):
    """How /v1/chat/completions differs from /v1/completions."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    choice_chunks = ChatChunks

    def decode(self, body: bytes) -> ChatRequest:
        """See ``ChoicesEndpoint``."""
        return decode_chat_request(body)

    async def prompts(self, server: ServerState, request: ChatRequest) -> list[Prompt]:
        """See ``ChoicesEndpoint``."""
        ids = await chat_tokens(server.model, server.text_threads, request)
        return [Prompt(tuple(truncated(ids, request, server.max_model_len)))]

    def choice(self, names: TokenNames, index: int, deltas: list[Delta]) -> dict[str, Any]:
        """See ``ChoicesEndpoint``."""
        entries = [d.logprobs for d in deltas if d.logprobs is not None]
        content = [chat_logprobs(entry, names) for entry in entries]
        return {
            "index": index,
            "message": _message(deltas),
            "logprobs": {"content": content, "refusal": None} if content else None,
            "finish_reason": deltas[-1].finish_reason,
        }

    def put_prompt_ids(self, body: dict[str, Any], choices: list[Choice]) -> None:
        """See ``ChoicesEndpoint``: all choices share one prompt."""
        body["prompt_token_ids"] = choices[0].generation.request.prompt_ids


def _message(deltas: list[Delta]) -> dict[str, Any]:
    content = "".join(delta.text for delta in deltas)
    calls = joined_calls(deltas)
    if not calls:
        return {"role": "assistant", "content": content}
    return {"role": "assistant", "content": content or None, "tool_calls": calls}
