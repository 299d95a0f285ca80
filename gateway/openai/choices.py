"""The endpoints whose answers are lists of choices: chat and text completions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gateway.endpoint import Endpoint, RequestType
from gateway.generation.answer import Answer
from gateway.generation.choice import Choice, Delta
from gateway.generation.logprobs import TokenNames
from gateway.generation.sampling import wants_logprobs
from gateway.generation.usage import usage
from gateway.request.schema import ChatRequest, CompletionRequest
from gateway.server_state import ServerState
from gateway.sse import Chunks, Stream


class ChoicesEndpoint(Endpoint[RequestType]):
    """What both do alike."""

    id_prefix: str
    object_name: str
    choice_chunks: Callable[[Stream], Chunks]

    def choice(self, names: TokenNames, index: int, deltas: list[Delta]) -> dict[str, Any]:
        """One item of ``choices`` of a whole answer."""
        raise NotImplementedError

    def put_prompt_ids(self, body: dict[str, Any], choices: list[Choice]) -> None:
        """Add ``prompt_token_ids`` of ``choices`` where vLLM has them for this endpoint."""
        raise NotImplementedError

    def chunks(self, server: ServerState, request: RequestType, answer: Answer) -> Chunks:
        """See ``Endpoint``."""
        options = request.stream_options
        return self.choice_chunks(
            Stream(
                answer_id=self.id_prefix + answer.id,
                created=answer.created,
                model=server.model.name,
                with_usage=bool(options and options.include_usage),
                with_ids=request.return_token_ids,
                names=_names(server, request),
            )
        )

    def whole(
        self,
        server: ServerState,
        request: RequestType,
        answer: Answer,
        deltas: list[list[Delta]],
    ) -> dict[str, Any]:
        """See ``Endpoint``."""
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
