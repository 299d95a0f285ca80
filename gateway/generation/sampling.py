"""Request fields to the ``SamplingParams`` that the workers get."""

from __future__ import annotations

import secrets

from gateway.prompts.served_model import ServedModel
from gateway.request.schema import ChatRequest, CompletionRequest, GenerationFields
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
    bad_words: tuple[tuple[int, ...], ...] = (),
    grammar: str = "",
) -> SamplingParams:
    """Validate against the model and the prompt, and fill every field.

    Args:
        request: The decoded body.
        model: The served model.
        num_prompt_tokens: Length of the prompt.
        max_model_len: Longest prompt and output together, in tokens.
        bad_words: From ``bad_word_ids``, which is the same for all prompts of a request.

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
        allowed_token_ids=_allowed(request, model, stop_token_ids if min_tokens else ()),
        bad_words=bad_words,
        grammar=grammar,
    )


def bad_word_ids(request: GenerationFields, model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Token sequences of ``bad_words``: each as it is, and after a space as in running text.

    Raises:
        InvalidRequest: they could leave no token to choose.
    """
    found: set[tuple[int, ...]] = set()
    for word in request.bad_words or ():
        for text in (word, " " + word.lstrip()):
            ids = tuple(model.tokenizer.encode(text, add_special_tokens=False))
            if ids:
                found.add(ids)
    num_masked = len(found) + len(request.stop_token_ids or ()) + len(model.eos_token_ids)
    if found and num_masked >= model.tokenizer.vocab_size:
        raise InvalidRequest("bad_words leave no token", param="bad_words")
    return tuple(sorted(found))


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


def _allowed(
    request: GenerationFields, model: ServedModel, masked: tuple[int, ...]
) -> tuple[int, ...]:
    allowed = tuple(sorted(set(request.allowed_token_ids or ())))
    for token_id in allowed:
        _check_token(token_id, model, "allowed_token_ids")
    if allowed and not set(allowed) - set(masked):
        raise InvalidRequest(
            "min_tokens leaves none of allowed_token_ids", param="allowed_token_ids"
        )
    if allowed and request.bad_words:
        raise InvalidRequest(
            "bad_words and allowed_token_ids exclude each other", param="bad_words"
        )
    return allowed


def wants_logprobs(request: ChatRequest | CompletionRequest) -> bool:
    """Whether the answer shows log-probabilities."""
    if isinstance(request, ChatRequest):
        return bool(request.logprobs)
    return request.logprobs is not None


def _num_logprobs(request: ChatRequest | CompletionRequest) -> int:
    if not wants_logprobs(request):
        return 0 if request.num_samples > (request.n or 1) else -1  # best_of ranks by them
    if isinstance(request, ChatRequest):
        return request.top_logprobs or 0
    return request.logprobs or 0
