"""Builds the objects of one answer.

Answer ─┬─ Choice     one for each prompt and sample: tokens to text
        │    └─ Generation   its tokens; the later samples of a prompt run where the first one does
        │         └─ Attempt, one after the other
        └─ …          a RequestMetrics with each: hears about tokens and the end
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from gateway.generation.answer import Answer
from gateway.generation.choice import Choice
from gateway.generation.generation import Generation
from gateway.generation.generation_request import GenerationRequest
from gateway.generation.output_rules import OutputRules
from gateway.generation.sampling import bad_word_ids, build_sampling, seed_of_sample
from gateway.observe.request_metrics import RequestMetrics
from gateway.observe.request_trace import RequestTrace
from gateway.observe.timeline import Arrival
from gateway.request.schema import ChatRequest, CompletionRequest
from gateway.server_state import ServerState
from mesh.errors import InvalidRequest
from mesh.messages import SamplingParams

MAX_CHOICES = 128
"""Prompts times samples of one HTTP request."""


class Prompt(NamedTuple):
    """One prompt of a request."""

    token_ids: tuple[int, ...]
    shown: str = ""
    """Text put before the output (``echo``)."""
    unfinished: bytes = b""
    """The prompt's last bytes, when they are the beginning of a character: the output ends it."""


class AnswerFactory:
    """Builds one answer; it holds what all its choices share."""

    def __init__(
        self,
        server: ServerState,
        request: ChatRequest | CompletionRequest,
        *,
        rules: OutputRules,
        arrival: Arrival,
        on_slow_reader: Callable[[], None],
        trace: RequestTrace | None = None,
    ) -> None:
        """Prepare.

        Args:
            server: The server's state.
            request: The decoded body.
            rules: What the answers follow; its grammar has been checked.
            arrival: When what came before was done.
            on_slow_reader: Called when the client reads too slowly; must break the connection.
            trace: Where the attempts' spans go.
        """
        self._server = server
        self._request = request
        self._rules = rules
        self._arrival = arrival
        self._on_slow_reader = on_slow_reader
        self._trace = trace
        self._answer_id = uuid.uuid4().hex
        self._wake = asyncio.Event()
        spent_s = time.monotonic() - arrival.arrived_s
        now_s = asyncio.get_running_loop().time()
        self._deadline_s = now_s + server.request_timeout_s - spent_s
        self._stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        self._pieces: Sequence[bytes] = server.model.tokenizer.pieces_with_special
        if request.skip_special_tokens:
            parses = rules.tools is not None
            self._pieces = server.model.tool_pieces if parses else server.model.tokenizer.pieces

    def build(self, prompts: Sequence[Prompt], *, shows_timing: bool = False) -> Answer:
        """The answer to ``prompts``; nothing is started.

        Args:
            prompts: The request's, tokenised.
            shows_timing: The client wants to see where the time went.

        Raises:
            InvalidRequest: a value is out of range for this model and these prompts.
        """
        server, request, num_samples = self._server, self._request, self._request.num_samples
        if len(prompts) * num_samples > MAX_CHOICES:
            param = "n" if request.best_of is None else "best_of"
            raise InvalidRequest(f"more than {MAX_CHOICES} choices", param=param)
        bad_words = bad_word_ids(request, server.model)
        choices: list[Choice] = []
        for prompt in prompts:
            sampling = build_sampling(
                request,
                server.model,
                num_prompt_tokens=len(prompt.token_ids),
                max_model_len=server.max_model_len,
                grammar=self._rules.grammar,
                bad_words=bad_words,
            )
            first: Generation | None = None
            for sample in range(num_samples):
                seed = seed_of_sample(sampling.seed, sample)
                seeded = msgspec.structs.replace(sampling, seed=seed)
                choices.append(self._choice(len(choices), prompt, seeded, first))
                first = first or choices[-1].generation
        return Answer(
            self._answer_id,
            choices,
            samples_per_prompt=num_samples,
            wake=self._wake,
            shows_timing=shows_timing,
        )

    def _choice(
        self, index: int, prompt: Prompt, sampling: SamplingParams, sibling: Generation | None
    ) -> Choice:
        request, tools = self._request, self._rules.tools
        request_id = f"{self._answer_id}-{index}"
        request_metrics = RequestMetrics(
            self._arrival,
            len(prompt.token_ids),
            slo_class=request.slo_class,
            request_id=request_id,
            history=self._server.history,
        )
        generation = Generation(
            self._server.cluster,
            GenerationRequest(
                request_id=request_id,
                prompt_ids=prompt.token_ids,
                sampling=sampling,
                deadline_s=self._deadline_s,
                priority=request.priority,
                cache_salt=request.cache_salt or "",
                slo_class=request.slo_class,
            ),
            request_metrics=request_metrics,
            on_ready=self._wake.set,
            on_slow_reader=self._on_slow_reader,
            sibling=sibling,
            trace=self._trace,
        )
        return Choice(
            index,
            generation,
            self._pieces,
            request_metrics,
            stops=self._stops,
            include_stop=request.include_stop_str_in_output,
            prefix=prompt.shown,
            tools=None if tools is None else tools.parser(),
            unfinished=prompt.unfinished,
        )
