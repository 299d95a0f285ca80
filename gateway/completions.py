"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from gateway.answer import Answer, Prompt
from gateway.choice import Delta
from gateway.endpoint import Endpoint
from gateway.frontend import MAX_CHOICES, Frontend
from gateway.logprobs import CompletionLogprobs
from gateway.schema import CompletionRequest, decode_completion_request
from gateway.sse import CompletionChunks
from mesh.errors import ContextTooLong, InvalidRequest


async def completions(http_request: web.Request) -> web.StreamResponse:
    """Continue one or more prompts."""
    return await CompletionEndpoint().serve(http_request)


class CompletionEndpoint(Endpoint[CompletionRequest]):
    """How /v1/completions differs from /v1/chat/completions."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunks = CompletionChunks

    def decode(self, body: bytes) -> CompletionRequest:
        """See ``Endpoint``."""
        return decode_completion_request(body)

    async def prompts(self, frontend: Frontend, request: CompletionRequest) -> list[Prompt]:
        """See ``Endpoint``."""
        return [await _prompt(frontend, request, item) for item in _items(request)]

    def choice(
        self, frontend: Frontend, answer: Answer, index: int, deltas: list[Delta]
    ) -> dict[str, Any]:
        """See ``Endpoint``."""
        collected: CompletionLogprobs | None = None
        for delta in deltas:
            if delta.logprobs is not None:
                collected = collected or CompletionLogprobs(frontend.model.tokenizer)
                collected.add(delta.logprobs, delta.text)
        return {
            "index": index,
            "text": "".join(delta.text for delta in deltas),
            "logprobs": collected.take() if collected else None,
            "finish_reason": deltas[-1].finish_reason,
        }

    def put_prompt_ids(self, body: dict[str, Any], answer: Answer) -> None:
        """See ``Endpoint``: each prompt has its own."""
        for choice in answer.choices:
            shown = body["choices"][choice.index]
            shown["prompt_token_ids"] = choice.generation.request.prompt_ids


def _items(request: CompletionRequest) -> list[str | list[Any]]:
    """The prompts: strings or lists that should be token ids."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is an empty list", param="prompt")
    if type(prompt[0]) is int:
        return [prompt]
    if len(prompt) > MAX_CHOICES:
        raise InvalidRequest(f"more than {MAX_CHOICES} prompts", param="prompt")
    if all(isinstance(item, str) for item in prompt):
        return prompt
    if all(isinstance(item, list) for item in prompt):
        return prompt
    raise InvalidRequest(
        "prompt must be a string, a list of strings, token ids, or a list of lists of token ids",
        param="prompt",
    )


async def _prompt(frontend: Frontend, request: CompletionRequest, item: str | list[Any]) -> Prompt:
    tokenizer = frontend.model.tokenizer
    if isinstance(item, str):
        special = request.add_special_tokens
        ids = await frontend.tokenise(
            len(item), lambda: tokenizer.encode(item, add_special_tokens=special)
        )
        shown = item
    else:
        _check_ids(frontend, item)
        ids = item
        shown = tokenizer.decode(ids) if request.echo else ""
    if not ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    return Prompt(tuple(ids), shown if request.echo else "")


def _check_ids(frontend: Frontend, ids: list[Any]) -> None:
    if len(ids) >= frontend.max_model_len:
        raise ContextTooLong(
            f"the prompt has {len(ids)} tokens, which leaves no room for output in a context of "
            f"{frontend.max_model_len}",
            param="prompt",
        )
    vocab_size = frontend.model.tokenizer.vocab_size
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{str(token_id)[:40]} is not a token id below {vocab_size}", param="prompt"
            )
