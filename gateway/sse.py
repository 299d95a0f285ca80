"""Streams an answer as server-sent events."""

from __future__ import annotations

from typing import Any, Protocol

from aiohttp import web

from gateway.client_writer import finish, open_stream, write
from gateway.generation.answer import Answer
from gateway.generation.choice import Choice, Delta
from gateway.generation.usage import usage
from gateway.observe.request_metrics import count_failure
from gateway.request.schema import ChatRequest, CompletionRequest
from mesh.errors import PdmeshError


class Chunks(Protocol):
    """Formats the events of one stream."""

    def token(self, choice: Choice, delta: Delta, usage: dict[str, Any] | None) -> bytes:
        """The event of one token; ``usage`` so far where the client asked for it every time."""
        ...

    def end(self, usage: dict[str, Any]) -> bytes:
        """What follows the last token; ``usage`` is that of the whole answer."""
        ...

    def error(self, error: PdmeshError) -> bytes:
        """What a stream ends with when its answer fails after the first byte."""
        ...

    def timing(self, timing: list[dict[str, Any]]) -> bytes:
        """An event without choice that says where the time went."""
        ...


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
