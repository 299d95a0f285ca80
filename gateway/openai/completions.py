"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from gateway.endpoint import serve
from gateway.generation.answer import Answer
from gateway.generation.answer_factory import MAX_CHOICES, Prompt
from gateway.generation.choice import Choice, Delta
from gateway.generation.detokenizer import unfinished_bytes
from gateway.generation.logprobs import CompletionLogprobs, TokenNames
from gateway.openai.choices import ChoiceList
from gateway.openai.chunks import CompletionChunks
from gateway.prompts.conversation import FieldNames
from gateway.prompts.token_ids import check_token_ids, truncated
from gateway.request.decoding import decode_completion_request
from gateway.request.schema import CompletionRequest
from gateway.server_state import ServerState
from mesh.errors import ContextTooLong, InvalidRequest


async def completions(http_request: web.Request) -> web.StreamResponse:
    """Continue one or more prompts."""
    return await serve(http_request, CompletionDialect)


class CompletionDialect:
    """The ``Dialect`` of /v1/completions."""

    def __init__(self, body: bytes) -> None:
        self.request = decode_completion_request(body)
        self.names = FieldNames({})

    async def prompts(self, server: ServerState) -> list[Prompt]:
        """As many as the body has."""
        return [await _prompt(server, self.request, item) for item in _items(self.request)]

    def chunks(self, server: ServerState, answer: Answer) -> CompletionChunks:
        """Events of chunks."""
        return CompletionChunks(_CHOICES.stream(server, self.request, answer))

    def whole(
        self, server: ServerState, answer: Answer, deltas: list[list[Delta]]
    ) -> dict[str, Any]:
        """A ``text_completion``."""
        return _CHOICES.whole(server, self.request, answer, deltas)


def _choice(names: TokenNames, index: int, deltas: list[Delta]) -> dict[str, Any]:
    collected: CompletionLogprobs | None = None
    for delta in deltas:
        if delta.logprobs is not None:
            collected = collected or CompletionLogprobs(names)
            collected.add(delta.logprobs, delta.text)
    return {
        "index": index,
        "text": "".join(delta.text for delta in deltas),
        "logprobs": collected.take() if collected else None,
        "finish_reason": deltas[-1].finish_reason,
    }


def _put_prompt_ids(body: dict[str, Any], choices: list[Choice]) -> None:
    """Each prompt has its own."""
    for shown, choice in zip(body["choices"], choices, strict=True):
        shown["prompt_token_ids"] = choice.generation.request.prompt_ids


_CHOICES = ChoiceList(
    id_prefix="cmpl-",
    object_name="text_completion",
    choice=_choice,
    put_prompt_ids=_put_prompt_ids,
)


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


async def _prompt(server: ServerState, request: CompletionRequest, item: str | list[Any]) -> Prompt:
    tokenizer = server.model.tokenizer
    shown: str | None = None
    if isinstance(item, str):
        special = request.add_special_tokens
        ids = await server.text_threads.run_if_long(
            len(item), lambda: tokenizer.encode(item, add_special_tokens=special)
        )
        shown = item
    else:
        ids = item
    kept = truncated(ids, request, server.max_model_len)
    _check_length(server, kept)
    check_token_ids(server.model, kept, "prompt")
    pieces = tokenizer.pieces if request.skip_special_tokens else tokenizer.pieces_with_special
    unfinished = b"" if isinstance(item, str) else unfinished_bytes(pieces, kept)
    if not request.echo:
        shown = ""
    elif shown is None or len(kept) < len(ids):
        data = b"".join(tokenizer.pieces[token_id] for token_id in kept)
        shown = data.removesuffix(unfinished).decode("utf-8", "replace")
    return Prompt(tuple(kept), shown, unfinished)


def _check_length(server: ServerState, ids: list[int]) -> None:
    if not ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if len(ids) >= server.max_model_len:
        raise ContextTooLong(
            f"the prompt has {len(ids)} tokens, which leaves no room for output in a context of "
            f"{server.max_model_len}",
            param="prompt",
        )
