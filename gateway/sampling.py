"""Request fields to the ``SamplingParams`` that the workers get."""

from __future__ import annotations

import secrets

from gateway.schema import ChatRequest, CompletionRequest, GenerationFields
from gateway.served_model import ServedModel
from mesh.errors import ContextTooLong, InvalidRequest
from mesh.messages import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
_SEED_MASK = (1 << 63) - 1
_SEED_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads the seeds of samples


def build_sampling(
    request: ChatRequest | CompletionRequest,
    model: ServedModel,
    *,
    num_prompt_tokens: int,
    max_model_len: int,
    grammar: str = "",
) -> SamplingParams:
    """Validate against the model and the prompt, and fill every field.

    Raises:
        ContextTooLong: prompt and output are over ``max_model_len``.
        InvalidRequest: a token id outside the vocabulary, or min_tokens over max_tokens.
    """
    max_tokens = _max_tokens(request, num_prompt_tokens, max_model_len)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens {min_tokens} is over the output limit of {max_tokens}", param="min_tokens"
        )
    defaults = model.defaults
    stop_token_ids = tuple(request.stop_token_ids or ())
    for token_id in stop_token_ids:
        _check_token(token_id, model, "stop_token_ids")
    if not request.ignore_eos:
        stop_token_ids += model.eos_token_ids
    if grammar and not stop_token_ids:
        raise InvalidRequest("the model has no token that could end a structured output")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_given(request.temperature, defaults.temperature),
        top_k=max(0, int(_given(request.top_k, defaults.top_k))),
        top_p=_given(request.top_p, defaults.top_p),
        min_p=_given(request.min_p, defaults.min_p),
        seed=secrets.randbits(63) if request.seed is None else request.seed & _SEED_MASK,
        repetition_penalty=_given(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_given(request.presence_penalty, 0.0),
        frequency_penalty=_given(request.frequency_penalty, 0.0),
        logit_bias=_logit_bias(request, model),
        min_tokens=min_tokens,
        stop_token_ids=tuple(sorted(set(stop_token_ids))),
        num_logprobs=_num_logprobs(request),
        grammar=grammar,
    )


def seed_of_sample(seed: int, sample: int) -> int:
    """Seed of the ``sample``-th of n answers; the first has the request's own."""
    return (seed + sample * _SEED_STEP) & _SEED_MASK


def _max_tokens(
    request: ChatRequest | CompletionRequest, num_prompt_tokens: int, max_model_len: int
) -> int:
    room = max_model_len - num_prompt_tokens
    chat = isinstance(request, ChatRequest)
    if room < 1:
        raise ContextTooLong(
            f"the prompt has {num_prompt_tokens} tokens, which leaves no room for output in a "
            f"context of {max_model_len}",
            param="messages" if chat else "prompt",
        )
    field, wanted = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        field, wanted = "max_completion_tokens", request.max_completion_tokens
    if wanted is None:
        return room if chat else min(room, DEFAULT_COMPLETION_TOKENS)
    if wanted > room:
        raise ContextTooLong(
            f"{field} {wanted} and a prompt of {num_prompt_tokens} tokens are over the context of "
            f"{max_model_len}",
            param=field,
        )
    return wanted


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _check_token(token_id: int, model: ServedModel, param: str) -> None:
    if not 0 <= token_id < model.tokenizer.vocab_size:
        raise InvalidRequest(
            f"token id {token_id} is not in the vocabulary of {model.tokenizer.vocab_size}",
            param=param,
        )


def _logit_bias(request: GenerationFields, model: ServedModel) -> tuple[tuple[int, float], ...]:
    bias = []
    for key, value in (request.logit_bias or {}).items():
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise InvalidRequest(f"{key!r} is not a token id", param="logit_bias")
        _check_token(int(key), model, "logit_bias")
        bias.append((int(key), value))
    return tuple(bias)


def _num_logprobs(request: ChatRequest | CompletionRequest) -> int:
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else -1
    return -1 if request.logprobs is None else request.logprobs
