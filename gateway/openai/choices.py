"""Answers that are lists of choices: chat and text completions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway.generation.answer import Answer
from gateway.generation.choice import Choice, Delta
from gateway.generation.logprobs import TokenNames
from gateway.generation.sampling import wants_logprobs
from gateway.generation.usage import usage
from gateway.openai.chunks import Stream
from gateway.request.schema import ChatRequest, CompletionRequest
from gateway.server_state import ServerState


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceList:
    """How one of the endpoints writes its list."""

    id_prefix: str
    object_name: str
    choice: Callable[[TokenNames, int, list[Delta]], dict[str, Any]]
    """Writes one item of ``choices`` of a whole answer."""
    put_prompt_ids: Callable[[dict[str, Any], list[Choice]], None]
    """Adds ``prompt_token_ids`` of these choices where vLLM has them for this endpoint."""

    def stream(
        self, server: ServerState, request: ChatRequest | CompletionRequest, answer: Answer
    ) -> Stream:
        """What all events of a streamed answer have in common."""
        options = request.stream_options
        return Stream(
            answer_id=self.id_prefix + answer.id,
            created=answer.created,
            model=server.model.name,
            with_usage=bool(options and options.include_usage),
            with_ids=request.return_token_ids,
            names=_names(server, request),
        )

    def whole(
        self,
        server: ServerState,
        request: ChatRequest | CompletionRequest,
        answer: Answer,
        deltas: list[list[Delta]],
    ) -> dict[str, Any]:
        """The body of a whole answer; ``deltas`` are all those of each choice."""
        kept = best_choices(deltas, answer.samples_per_prompt, request.n or 1)
        shown = [deltas[index] for index in kept]
        if not wants_logprobs(request):
            shown = [[delta._replace(logprobs=None) for delta in one] for one in shown]
        names = _names(server, request)
        choices = [self.choice(names, index, one) for index, one in enumerate(shown)]
        if request.return_token_ids:
            for choice, one in zip(choices, shown, strict=True):
                choice["token_ids"] = [delta.token_id for delta in one]
        body: dict[str, Any] = {
            "id": self.id_prefix + answer.id,
            "object": self.object_name,
            "created": answer.created,
            "model": server.model.name,
            "choices": choices,
            "usage": usage(answer.choices, answer.samples_per_prompt),
        }
        if answer.shows_timing:
            timing = answer.timing()
            body["pdmesh_timing"] = [timing[index] for index in kept]
        if request.return_token_ids:
            self.put_prompt_ids(body, [answer.choices[index] for index in kept])
        return body


def best_choices(deltas: list[list[Delta]], num_samples: int, num_wanted: int) -> list[int]:
    """Indices of the answers to return: per prompt, those likeliest per token, the best first."""
    if num_samples == num_wanted:
        return list(range(len(deltas)))
    kept: list[int] = []
    for start in range(0, len(deltas), num_samples):
        samples = range(start, start + num_samples)
        kept += sorted(samples, key=lambda index: -_mean_logprob(deltas[index]))[:num_wanted]
    return kept


def _mean_logprob(deltas: list[Delta]) -> float:
    values = [delta.logprobs.logprob for delta in deltas if delta.logprobs is not None]
    return sum(values) / len(values) if values else -math.inf


def _names(server: ServerState, request: ChatRequest | CompletionRequest) -> TokenNames:
    as_ids = bool(request.return_tokens_as_token_ids)
    return TokenNames(server.model.tokenizer, as_ids=as_ids)
