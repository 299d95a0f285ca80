"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from gateway.endpoint import serve
from gateway.generation.answer import Answer
from gateway.generation.answer_factory import Prompt
from gateway.generation.choice import Choice, Delta
from gateway.generation.logprobs import TokenNames, chat_logprobs
from gateway.openai.choices import ChoiceList
from gateway.openai.chunks import ChatChunks
from gateway.openai.tool_calls import joined_calls
from gateway.prompts.chat import chat_tokens
from gateway.prompts.conversation import FieldNames
from gateway.prompts.token_ids import truncated
from gateway.request.decoding import decode_chat_request
from gateway.server_state import ServerState


async def chat_completions(http_request: web.Request) -> web.StreamResponse:
    """Answer the next turn of a conversation."""
    return await serve(http_request, ChatDialect)


class ChatDialect:
    """The ``Dialect`` of /v1/chat/completions."""

    def __init__(self, body: bytes) -> None:
        self.request = decode_chat_request(body)
        self.names = FieldNames({})

    async def prompts(self, server: ServerState) -> list[Prompt]:
        """The rendered conversation."""
        ids = await chat_tokens(server.model, server.text_threads, self.request)
        return [Prompt(tuple(truncated(ids, self.request, server.max_model_len)))]

    def chunks(self, server: ServerState, answer: Answer) -> ChatChunks:
        """Events of chunks."""
        return ChatChunks(_CHOICES.stream(server, self.request, answer))

    def whole(
        self, server: ServerState, answer: Answer, deltas: list[list[Delta]]
    ) -> dict[str, Any]:
        """A ``chat.completion``."""
        return _CHOICES.whole(server, self.request, answer, deltas)


def _choice(names: TokenNames, index: int, deltas: list[Delta]) -> dict[str, Any]:
    entries = [d.logprobs for d in deltas if d.logprobs is not None]
    content = [chat_logprobs(entry, names) for entry in entries]
    return {
        "index": index,
        "message": _message(deltas),
        "logprobs": {"content": content, "refusal": None} if content else None,
        "finish_reason": deltas[-1].finish_reason,
    }


def _message(deltas: list[Delta]) -> dict[str, Any]:
    content = "".join(delta.text for delta in deltas)
    calls = joined_calls(deltas)
    if not calls:
        return {"role": "assistant", "content": content}
    return {"role": "assistant", "content": content or None, "tool_calls": calls}


def _put_prompt_ids(body: dict[str, Any], choices: list[Choice]) -> None:
    """All choices share one prompt."""
    body["prompt_token_ids"] = choices[0].generation.request.prompt_ids


_CHOICES = ChoiceList(
    id_prefix="chatcmpl-",
    object_name="chat.completion",
    choice=_choice,
    put_prompt_ids=_put_prompt_ids,
)
