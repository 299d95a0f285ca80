"""What the two generating endpoints do alike: from an HTTP body to the answer."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import orjson
from aiohttp import web

from gateway.answer import Answer, Prompt, stream_answer
from gateway.choice import Choice, Delta
from gateway.client_writer import send_json
from gateway.errors import SlowReader
from gateway.frontend import FRONTEND, Frontend
from gateway.logprobs import TokenNames
from gateway.output_rules import output_rules
from gateway.request_body import read_body
from gateway.request_ids import ANSWER_ID, client_request_id
from gateway.request_metrics import count_failure
from gateway.request_trace import RequestTrace
from gateway.sampling import wants_logprobs
from gateway.schema import ChatRequest, CompletionRequest
from gateway.sse import Chunks, Stream
from gateway.timeline import Arrival
from gateway.usage import usage
from mesh.log_format import about

TIMING_HEADER = "X-Pdmesh-Timing"
"""``1`` asks for ``pdmesh_timing`` in the answer."""

_logger = logging.getLogger(__name__)
_Request = TypeVar("_Request", ChatRequest, CompletionRequest)


class Endpoint(Generic[_Request]):
    """One generating endpoint; subclasses fill in what differs."""

    id_prefix: str
    object_name: str
    chunks: Callable[[Stream], Chunks]

    def decode(self, body: bytes) -> _Request:
        """Decode and validate the body."""
        raise NotImplementedError

    async def prompts(self, frontend: Frontend, request: _Request) -> list[Prompt]:
        """Tokenise the request's prompts."""
        raise NotImplementedError

    def choice(self, names: TokenNames, index: int, deltas: list[Delta]) -> dict[str, Any]:
        """One item of ``choices`` of a whole answer."""
        raise NotImplementedError

    def put_prompt_ids(self, body: dict[str, Any], choices: list[Choice]) -> None:
        """Add ``prompt_token_ids`` of ``choices`` where vLLM has them for this endpoint."""
        raise NotImplementedError

    async def serve(self, http_request: web.Request) -> web.StreamResponse:
        """Run the request and answer it.

        Raises:
            PdmeshError: it failed before the first byte of the answer.
        """
        arrived_s = time.monotonic()
        frontend = http_request.app[FRONTEND]
        if frontend.tracing is None:
            return await self._serve(http_request, frontend, arrived_s, None)
        parent = http_request.headers.get("traceparent", "")
        with RequestTrace(frontend.tracing, http_request.path, parent, arrived_s) as trace:
            return await self._serve(http_request, frontend, arrived_s, trace)

    async def _serve(
        self,
        http_request: web.Request,
        frontend: Frontend,
        arrived_s: float,
        trace: RequestTrace | None,
    ) -> web.StreamResponse:
        request = self.decode(await read_body(http_request, frontend))
        shows_timing = http_request.headers.get(TIMING_HEADER) == "1"
        frontend.check_model(request.model)
        with frontend.admitted():
            rules = output_rules(request, frontend.model)
            if rules.grammar:
                await frontend.grammars.check(rules.grammar, rules.param)
            decoded_s = time.monotonic()
            prompts = await self.prompts(frontend, request)
            arrival = Arrival(arrived_s, decoded_s, time.monotonic())
            answer = Answer(
                frontend,
                request,
                prompts,
                rules=rules,
                arrived_s=arrived_s,
                on_slow_reader=lambda: _break_connection(http_request),
                arrival=arrival,
                shows_timing=shows_timing,
                trace=trace,
            )
            http_request[ANSWER_ID] = answer.id
            _note(http_request, answer, arrival, trace)
            with answer:
                if request.stream:
                    return await self._stream(http_request, frontend, request, answer)
                body = await self._whole(frontend, request, answer)
                return await send_json(http_request, body)

    async def _stream(
        self, http_request: web.Request, frontend: Frontend, request: _Request, answer: Answer
    ) -> web.StreamResponse:
        options = request.stream_options
        chunks = self.chunks(
            Stream(
                answer_id=self.id_prefix + answer.id,
                created=answer.created,
                model=frontend.model.name,
                with_usage=bool(options and options.include_usage),
                with_ids=request.return_token_ids,
                names=_names(frontend, request),
            )
        )
        return await stream_answer(http_request, answer, chunks, request)

    async def _whole(self, frontend: Frontend, request: _Request, answer: Answer) -> bytes:
        deltas = await answer.collect()
        kept = best_choices(deltas, answer.samples_per_prompt, request.n or 1)
        shown = [deltas[index] for index in kept]
        if not wants_logprobs(request):
            shown = [[delta._replace(logprobs=None) for delta in one] for one in shown]
        names = _names(frontend, request)
        choices = [self.choice(names, index, one) for index, one in enumerate(shown)]
        if request.return_token_ids:
            for choice, one in zip(choices, shown, strict=True):
                choice["token_ids"] = [delta.token_id for delta in one]
        body: dict[str, Any] = {
            "id": self.id_prefix + answer.id,
            "object": self.object_name,
            "created": answer.created,
            "model": frontend.model.name,
            "choices": choices,
            "usage": usage(answer.choices, answer.samples_per_prompt),
        }
        if answer.shows_timing:
            timing = answer.timing()
            body["pdmesh_timing"] = [timing[index] for index in kept]
        if request.return_token_ids:
            self.put_prompt_ids(body, [answer.choices[index] for index in kept])
        return orjson.dumps(body)


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


def _names(frontend: Frontend, request: ChatRequest | CompletionRequest) -> TokenNames:
    as_ids = bool(request.return_tokens_as_token_ids)
    return TokenNames(frontend.model.tokenizer, as_ids=as_ids)


def _note(
    http_request: web.Request, answer: Answer, arrival: Arrival, trace: RequestTrace | None
) -> None:
    """Have the request found by its ids in log and trace."""
    client_id = client_request_id(http_request)
    prompts = answer.choices[:: answer.samples_per_prompt]
    num_tokens = sum(len(choice.generation.request.prompt_ids) for choice in prompts)
    if _logger.isEnabledFor(logging.DEBUG):
        ids = about(answer.id, client_request_id=client_id)
        _logger.debug("request path=%s prompt_tokens=%d", http_request.path, num_tokens, extra=ids)
    if trace is not None:
        trace.tokenised(arrival, num_tokens)
        trace.describe({"pdmesh.request_id": answer.id, "pdmesh.client_request_id": client_id})


def _break_connection(http_request: web.Request) -> None:
    """Cancels the handler, which may hang in a write that this client never takes."""
    transport = http_request.transport
    if transport is not None and not transport.is_closing():
        count_failure(SlowReader.code)
        transport.abort()
