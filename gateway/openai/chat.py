"""POST /v1/chat/completions."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from aiohttp import web

from gateway.generation.answer import Prompt
from gateway.generation.choice import Choice, Delta
from gateway.generation.logprobs import TokenNames, chat_logprobs
from gateway.generation.output_rules import callable_tools
from gateway.openai.choices import ChoicesEndpoint
from gateway.openai.tool_calls import joined_calls
from gateway.prompts.chat_template import MAX_RENDER_S, TemplateTimeout
from gateway.prompts.served_model import ServedModel
from gateway.prompts.token_ids import truncated
from gateway.request.schema import ChatRequest, decode_chat_request
from gateway.server_state import MAX_INLINE_CHARS, ServerState
from gateway.sse import ChatChunks
from gateway.tools.prompt import described_turns, native_turns, tools_variable
from mesh.errors import InvalidRequest

_INLINE_RENDER_S = 0.01


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
        ids = await chat_tokens(server, request)
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


async def chat_tokens(server: ServerState, request: ChatRequest) -> list[int]:
    """Token ids of the rendered conversation.

    A template that does not finish in a moment begins anew on a thread: however it loops, the event
    loop goes on.

    Raises:
        InvalidRequest: no template, or the template refuses the messages.
    """
    model = server.model
    num_chars = sum(len(message.text) for message in request.messages)
    if request.tools:
        num_chars += len(str(request.tools))
    if num_chars <= MAX_INLINE_CHARS and not request.chat_template_kwargs:
        with suppress(TemplateTimeout):
            return encode_chat(model, request, time_s=_INLINE_RENDER_S)
    return await server.in_thread(lambda: encode_chat(model, request, time_s=MAX_RENDER_S))


def encode_chat(model: ServedModel, request: ChatRequest, *, time_s: float) -> list[int]:
    """As ``chat_tokens``, here and now, with ``time_s`` for the template.

    Raises:
        TemplateTimeout: it took longer.
        InvalidRequest: no template, or the template refuses the messages.
    """
    if model.chat_template is None:
        raise InvalidRequest("the model has no chat template", param="messages")
    template, tools = model.chat_template, callable_tools(request)
    variables = request.chat_template_kwargs or {}
    if template.knows_tools:
        turns = native_turns(request.messages)
        variables = variables | {"tools": tools_variable(tools)} if tools else variables
    else:
        turns = described_turns(request.messages, tools)
    generate = request.add_generation_prompt
    text = template.render(
        turns,
        add_generation_prompt=not request.continue_final_message if generate is None else generate,
        continue_final_message=request.continue_final_message,
        variables=variables,
        time_s=time_s,
    )
    ids = model.tokenizer.encode(text, add_special_tokens=request.add_special_tokens)
    if not ids:
        raise InvalidRequest("the prompt is empty", param="messages")
    return ids


def _message(deltas: list[Delta]) -> dict[str, Any]:
    content = "".join(delta.text for delta in deltas)
    calls = joined_calls(deltas)
    if not calls:
        return {"role": "assistant", "content": content}
    return {"role": "assistant", "content": content or None, "tool_calls": calls}
