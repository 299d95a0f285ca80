"""One HTTP request's choices, run on the cluster and sent back: streamed or whole."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
from aiohttp import web

from gateway.client_writer import finish, open_stream, write
from gateway.generation.choice import Choice, Delta
from gateway.generation.generation import Generation, GenerationRequest
from gateway.generation.output_rules import OutputRules
from gateway.generation.sampling import bad_word_ids, build_sampling, seed_of_sample
from gateway.generation.usage import usage
from gateway.observe.request_metrics import RequestMetrics, count_failure
from gateway.observe.request_trace import RequestTrace
from gateway.observe.timeline import Arrival
from gateway.request.schema import ChatRequest, CompletionRequest
from gateway.server_state import MAX_CHOICES, ServerState
from gateway.sse import Chunks
from mesh.errors import InvalidRequest, PdmeshError


class Prompt(NamedTuple):
    """One prompt of a request."""

    token_ids: tuple[int, ...]
    shown: str = ""
    """Text put before the output (``echo``)."""
    unfinished: bytes = b""
    """The prompt's last bytes, when they are the beginning of a character: the output ends it."""


class Answer:
    """Context manager that owns the generations of one HTTP request: leaving it aborts the rest."""

    def __init__(
        self,
        server: ServerState,
        request: ChatRequest | CompletionRequest,
        prompts: Sequence[Prompt],
        *,
        rules: OutputRules,
        arrived_s: float,
        on_slow_reader: Callable[[], None],
        arrival: Arrival | None = None,
        shows_timing: bool = False,
        trace: RequestTrace | None = None,
    ) -> None:
        """Validate and prepare; entering starts the generations.

        Args:
            server: The gateway's state.
            request: The decoded body.
            prompts: Its prompts, tokenised.
            rules: What the answers follow; its grammar has been checked.
            arrived_s: ``time.monotonic()`` when the HTTP request came.
            on_slow_reader: Called when the client reads too slowly; must break the connection.
            arrival: When what came before was done.
            shows_timing: The client wants to see where the time went.
            trace: Where the attempts' spans go.

        Raises:
            InvalidRequest: a value is out of range for this model and these prompts.
        """
        self.id = uuid.uuid4().hex
        self.shows_timing = shows_timing
        self._running = server.running
        self.created = int(time.time())
        self.samples_per_prompt = request.num_samples
        if len(prompts) * self.samples_per_prompt > MAX_CHOICES:
            param = "n" if request.best_of is None else "best_of"
            raise InvalidRequest(f"more than {MAX_CHOICES} choices", param=param)
        self._wake = asyncio.Event()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + server.request_timeout_s - (time.monotonic() - arrived_s)
        pieces: Sequence[bytes] = server.model.tokenizer.pieces_with_special
        if request.skip_special_tokens:
            tools = rules.tools is not None
            pieces = server.model.tool_pieces if tools else server.model.tokenizer.pieces
        stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        bad_words = bad_word_ids(request, server.model)
        self.choices: list[Choice] = []
        for prompt in prompts:
            sampling = build_sampling(
                request,
                server.model,
                num_prompt_tokens=len(prompt.token_ids),
                max_model_len=server.max_model_len,
                grammar=rules.grammar,
                bad_words=bad_words,
            )
            first: Generation | None = None
            for sample in range(self.samples_per_prompt):
                index = len(self.choices)
                seed = seed_of_sample(sampling.seed, sample)
                request_metrics = RequestMetrics(
                    arrived_s,
                    len(prompt.token_ids),
                    slo_class=request.slo_class,
                    arrival=arrival,
                    request_id=f"{self.id}-{index}",
                    history=server.history,
                )
                generation = Generation(
                    server.cluster,
                    GenerationRequest(
                        request_id=f"{self.id}-{index}",
                        prompt_ids=prompt.token_ids,
                        sampling=msgspec.structs.replace(sampling, seed=seed),
                        deadline_s=deadline_s,
                        priority=request.priority,
                        cache_salt=request.cache_salt or "",
                        slo_class=request.slo_class,
                    ),
                    request_metrics=request_metrics,
                    on_ready=self._wake.set,
                    on_slow_reader=on_slow_reader,
                    sibling=first,
                    trace=trace,
                )
                first = first or generation
                choice = Choice(
                    index,
                    generation,
                    pieces,
                    request_metrics,
                    stops=stops,
                    include_stop=request.include_stop_str_in_output,
                    prefix=prompt.shown,
                    tools=None if rules.tools is None else rules.tools.parser(),
                    unfinished=prompt.unfinished,
                )
                self.choices.append(choice)

    def __enter__(self) -> Self:
        """Start all generations.

        Raises:
            Unavailable, Overloaded, ContextTooLong: the cluster does not take them.
        """
        try:
            for choice in self.choices:
                choice.generation.start()
        except PdmeshError as error:
            self._close(error)
            raise
        self._running.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Abort whatever has not finished."""
        self._running.discard(self)
        self._close(error)

    def fail(self, error: PdmeshError) -> None:
        """Abort whatever has not finished and end ``batches`` with ``error``."""
        for choice in self.choices:
            choice.generation.fail(error)

    def _close(self, error: BaseException | None) -> None:
        for choice in self.choices:
            choice.generation.close()
            if choice.finish_reason is not None:
                continue
            failure = choice.generation.error or error
            if isinstance(failure, PdmeshError):
                choice.failed(failure.code)
            else:
                choice.abandoned()

    async def batches(self) -> AsyncIterator[list[tuple[Choice, list[Delta]]]]:
        """What arrived, as it arrives, until every choice has finished.

        Raises:
            PdmeshError: a choice failed.
        """
        unfinished = list(self.choices)
        while unfinished:
            await self._wake.wait()
            self._wake.clear()
            batch = []
            failure: PdmeshError | None = None
            for choice in unfinished:
                try:
                    deltas = choice.read()
                except PdmeshError as error:
                    failure = error
                    continue
                if deltas:
                    batch.append((choice, deltas))
                if choice.generation.error is not None:
                    self._wake.set()  # its error comes after its last tokens
            if batch:
                yield batch
            if failure is not None:
                raise failure
            unfinished = [choice for choice in unfinished if choice.finish_reason is None]

    def timing(self) -> list[dict[str, Any]]:
        """Where the time of each choice went; call once all have finished."""
        return [{"index": choice.index} | choice.timing() for choice in self.choices]

    async def collect(self) -> list[list[Delta]]:
        """All deltas of every choice.

        Raises:
            PdmeshError: a choice failed.
        """
        deltas: list[list[Delta]] = [[] for _ in self.choices]
        async for batch in self.batches():
            for choice, new in batch:
                deltas[choice.index] += new
        return deltas


async def stream_answer(
    http_request: web.Request,
    answer: Answer,
    chunks: Chunks,
    request: ChatRequest | CompletionRequest,
) -> web.StreamResponse:
    """Send the answer as server-sent events; the status line waits for the first token.

    Raises:
        PdmeshError: it failed before the first byte.
    """
    options = request.stream_options
    every_time = bool(options and options.continuous_usage_stats)
    response: web.StreamResponse | None = None
    try:
        async for batch in answer.batches():
            data = bytearray()
            for choice, deltas in batch:
                so_far = usage(answer.choices, answer.samples_per_prompt) if every_time else None
                for delta in deltas:
                    data += chunks.token(choice, delta, so_far)
            if response is None:
                response = await open_stream(http_request)
            await write(http_request, response, data)
        last = chunks.end(usage(answer.choices, answer.samples_per_prompt))
        if answer.shows_timing:
            last = chunks.timing(answer.timing()) + last
    except PdmeshError as error:
        if response is None:
            raise
        count_failure(error.code)
        last = chunks.error(error)
    assert response is not None, "an answer has at least one token"
    await write(http_request, response, last)
    await finish(http_request, response)
    return response
