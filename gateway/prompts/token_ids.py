"""Checks and cuts of a prompt that is token ids already."""

from __future__ import annotations

from typing import Any

from gateway.prompts.served_model import ServedModel
from gateway.request.schema import ChatRequest, CompletionRequest
from mesh.errors import InvalidRequest


def check_token_ids(model: ServedModel, ids: list[Any], param: str) -> None:
    """Refuse whatever is not a token id of the served model.

    Raises:
        InvalidRequest: names ``param``.
    """
    vocab_size = model.tokenizer.vocab_size
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{str(token_id)[:40]} is not a token id below {vocab_size}", param=param
            )


def truncated(
    ids: list[int], request: ChatRequest | CompletionRequest, max_model_len: int
) -> list[int]:
    """The last ``truncate_prompt_tokens`` of ``ids``; -1: as many as fit, all when not given."""
    size = request.truncate_prompt_tokens
    if size is None:
        return ids
    if size < 0:
        output = request.max_tokens
        if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
            output = request.max_completion_tokens
        size = max(1, max_model_len - (output or 1))
    return ids[-size:]
