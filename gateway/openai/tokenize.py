"""POST /tokenize and /detokenize: text to the served model's token ids and back."""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway.client_writer import send_json
from gateway.openai.tokenize_schema import (
    DetokenizeAnswer,
    TokenizeAnswer,
    TokenizeChatRequest,
    TokenizePromptRequest,
    decode_detokenize_request,
    decode_tokenize_request,
)
from gateway.prompts.chat import chat_tokens
from gateway.prompts.token_ids import check_token_ids
from gateway.request_body import read_body
from gateway.server_state import SERVER_STATE, ServerState


async def tokenize(http_request: web.Request) -> web.StreamResponse:
    """Token ids of a text, or of a conversation as the chat endpoint would see it."""
    server = http_request.app[SERVER_STATE]
    with server.admitted(needs_workers=False):
        request = decode_tokenize_request(await read_body(http_request, server))
        server.check_model(request.model)
        ids = await _encode(server, request)
        answer = TokenizeAnswer(count=len(ids), max_model_len=server.max_model_len, tokens=ids)
        if request.return_token_strs:
            entry = server.model.tokenizer.entry
            answer.token_strs = [entry(token_id) for token_id in ids]
        return await send_json(http_request, msgspec.json.encode(answer))


async def detokenize(http_request: web.Request) -> web.StreamResponse:
    """Text of token ids, special tokens included."""
    server = http_request.app[SERVER_STATE]
    with server.admitted(needs_workers=False):
        request = decode_detokenize_request(await read_body(http_request, server))
        server.check_model(request.model)
        ids = request.tokens
        check_token_ids(server.model, ids, "tokens")
        tokenizer = server.model.tokenizer
        text = await server.text_threads.run_if_long(
            len(ids), lambda: tokenizer.decode(ids, skip_special_tokens=False)
        )
        answer = DetokenizeAnswer(prompt=text)
        return await send_json(http_request, msgspec.json.encode(answer))


async def _encode(
    server: ServerState, request: TokenizePromptRequest | TokenizeChatRequest
) -> list[int]:
    if isinstance(request, TokenizePromptRequest):
        tokenizer = server.model.tokenizer
        text, special = request.prompt, request.add_special_tokens
        return await server.text_threads.run_if_long(
            len(text), lambda: tokenizer.encode(text, add_special_tokens=special)
        )
    return await chat_tokens(server.model, server.text_threads, request.as_chat())
