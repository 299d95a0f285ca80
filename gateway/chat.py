"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from gateway.answer import Answer, Prompt
from gateway.choice import Delta
from gateway.endpoint import Endpoint
from gateway.frontend import Frontend
from gateway.logprobs import chat_logprobs
from gateway.output_rules import callable_tools
from gateway.schema import ChatRequest, decode_chat_request
from gateway.served_model import ServedModel
from gateway.sse import ChatChunks
from gateway.tool_calls import joined_calls
from gateway.tool_prompt import described_turns, native_turns, tools_variable
from mesh.errors import InvalidRequest


async def chat_completions(http_request: web.Request) -> web.StreamResponse:
    """Answer the next turn of a conversation."""
    return await ChatEndpoint().serve(http_request)


class ChatEndpoint(Endpoint[ChatRequest]):
    """How /v1/chat/completions differs from /v1/completions."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunks = ChatChunks

    def decode(self, body: bytes) -> ChatRequest:
        """See ``Endpoint``."""
        return decode_chat_request(body)

    async def prompts(self, frontend: Frontend, request: ChatRequest) -> list[Prompt]:
        """See ``Endpoint``."""
        num_chars = sum(len(message.text) for message in request.messages)
        if request.tools:
            num_chars += len(str(request.tools))
        ids = await frontend.tokenise(num_chars, lambda: _encode(frontend.model, request))
        return [Prompt(tuple(ids))]

    def choice(
        self, frontend: Frontend, answer: Answer, index: int, deltas: list[Delta]
    ) -> dict[str, Any]:
        """See ``Endpoint``."""
        tokenizer = frontend.model.tokenizer
        entries = [d.logprobs for d in deltas if d.logprobs is not None]
        content = [chat_logprobs(entry, tokenizer) for entry in entries]
        return {
            "index": index,
            "message": _message(deltas),
            "logprobs": {"content": content, "refusal": None} if content else None,
            "finish_reason": deltas[-1].finish_reason,
        }

    def put_prompt_ids(self, body: dict[str, Any], answer: Answer) -> None:
        """See ``Endpoint``: all choices share one prompt."""
        body["prompt_token_ids"] = answer.choices[0].generation.request.prompt_ids


def _encode(model: ServedModel, request: ChatRequest) -> list[int]:
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
