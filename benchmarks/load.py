"""A closed-loop load on a streaming HTTP API, and what came of it.

Each of N clients sends a request, reads its stream to the end, sends the next one:

    sent ──TTFT──> token ──ITL──> token ──ITL──> token          TPOT = mean of a request's ITLs
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import orjson

from mesh.errors import PdmeshError

_DATA = b"data:"
_TIMEOUT_S = 900.0


class LoadError(PdmeshError):
    """A server refused a request, or answered with another number of tokens than asked for."""

    code = "load_failed"


@dataclass(slots=True, frozen=True)
class Part:
    """What one event of a stream says."""

    has_tokens: bool
    total_tokens: int | None
    """The server's own count of output tokens, in the last event."""


class Api(Protocol):
    """How one kind of server is asked for tokens and how its stream is read."""

    path: str

    def body(self, prompt: list[int], num_output: int) -> dict[str, Any]:
        """Body of a POST: greedy, streamed, exactly ``num_output`` tokens."""
        ...

    def read(self, event: dict[str, Any]) -> Part:
        """Read one event."""
        ...


class OpenAICompletions:
    """``/v1/completions`` of pdmesh and of other servers that take token ids."""

    path = "/v1/completions"

    def __init__(self, model: str) -> None:
        self._model = model

    def body(self, prompt: list[int], num_output: int) -> dict[str, Any]:
        """See Api."""
        return {
            "model": self._model, "prompt": prompt, "max_tokens": num_output, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip

    def read(self, event: dict[str, Any]) -> Part:
        """See Api."""
        usage = event.get("usage")
        return Part(bool(event.get("choices")), usage["completion_tokens"] if usage else None)


class LlamaCompletion:
    """llama-server's own ``/completion``."""

    path = "/completion"

    def body(self, prompt: list[int], num_output: int) -> dict[str, Any]:
        """See Api."""
        return {
            "prompt": prompt, "n_predict": num_output, "temperature": 0, "ignore_eos": True,
            "stream": True, "cache_prompt": False,
        }  # fmt: skip

    def read(self, event: dict[str, Any]) -> Part:
        """See Api; tokens whose text is not whole characters yet come with a later event."""
        total = event["tokens_predicted"] if event.get("stop") else None
        return Part(bool(event.get("tokens")), total)


@dataclass(slots=True, frozen=True)
class Timing:
    """One finished request; times in seconds."""

    ttft_s: float
    gaps_s: tuple[float, ...]
    tpot_s: float
    num_output: int


@dataclass(slots=True)
class LoadResult:
    """One run of the load; times in milliseconds."""

    clients: int
    requests: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tpot_mean_ms: float
    ttft_mean_ms: float
    itl_mean_ms: float
    """Means are what a gateway's own histograms can be compared with."""
    prompt_tokens_per_s: float = field(default=float("nan"))
    """Prompt length over the median TTFT: with one client, the speed of prefill."""


async def run_load(
    url: str, api: Api, prompts: Sequence[list[int]], *, clients: int, num_output: int
) -> LoadResult:
    """Send all prompts, ``clients`` at a time.

    Raises:
        LoadError: a request failed; half a result would mislead.
    """
    waiting = list(reversed(prompts))
    timings: list[Timing] = []
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    # A connection each: llama-server drops the ones it has streamed on.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:

        async def client() -> None:
            while waiting:
                timings.append(await _request(session, api, waiting.pop(), num_output))

        start_s = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(clients):
                    group.create_task(client())
        except ExceptionGroup as failures:
            first = failures.exceptions[0]
            raise LoadError(f"{url}: {first}") from first
        wall_s = time.monotonic() - start_s
    return _summary(timings, len(prompts[0]), clients, wall_s)


async def _request(
    session: aiohttp.ClientSession, api: Api, prompt: list[int], num_output: int
) -> Timing:
    body = orjson.dumps(api.body(prompt, num_output))
    headers = {"Content-Type": "application/json"}
    arrivals: list[float] = []
    total: int | None = None
    sent_s = time.monotonic()
    async with session.post(api.path, data=body, headers=headers) as response:
        if response.status != 200:
            raise LoadError(f"HTTP {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(_DATA):
                continue
            now_s = time.monotonic()
            data = line[len(_DATA) :].strip()
            if data == b"[DONE]":
                break
            event = orjson.loads(data)
            if event.get("error"):
                raise LoadError(f"stream ended with {event['error']}")
            part = api.read(event)
            if part.has_tokens:
                arrivals.append(now_s)
            total = part.total_tokens if part.total_tokens is not None else total
    if total != num_output or not arrivals:
        raise LoadError(f"{num_output} tokens were asked for, the server made {total}")
    gaps = tuple(later - earlier for earlier, later in itertools.pairwise(arrivals))
    tpot_s = (arrivals[-1] - arrivals[0]) / max(1, num_output - 1)
    return Timing(arrivals[0] - sent_s, gaps, tpot_s, num_output)


def _summary(timings: Sequence[Timing], num_prompt: int, clients: int, wall_s: float) -> LoadResult:
    num_output = sum(timing.num_output for timing in timings)
    ttfts = [timing.ttft_s * 1000 for timing in timings]
    gaps = [gap * 1000 for timing in timings for gap in timing.gaps_s]
    result = LoadResult(
        clients=clients,
        requests=len(timings),
        output_tokens_per_s=num_output / wall_s,
        total_tokens_per_s=(num_output + num_prompt * len(timings)) / wall_s,
        ttft_p50_ms=percentile(ttfts, 50),
        ttft_p99_ms=percentile(ttfts, 99),
        itl_p50_ms=percentile(gaps, 50),
        itl_p99_ms=percentile(gaps, 99),
        tpot_mean_ms=statistics.fmean(timing.tpot_s for timing in timings) * 1000,
        ttft_mean_ms=statistics.fmean(ttfts),
        itl_mean_ms=statistics.fmean(gaps) if gaps else float("nan"),
    )
    if clients == 1:
        result.prompt_tokens_per_s = num_prompt / result.ttft_p50_ms * 1000
    return result


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the nearest ranks; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)
