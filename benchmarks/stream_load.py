"""Many concurrent chat streams, read as cheaply as Python can: events are counted, not parsed.

``benchmarks.load`` parses every event; beside a gateway that is what would be measured. Here each
stream is one connection, kept open, whose reads cost a search for the beginning of an event:

    stream 0   |──── request ────|── request ──|──────── request …
    stream 1     |── request ──|──────── request ────────|── requ…      lengths vary, and starts are
    stream 2       |──────── request ────────|──── request ────|…       spread: no herd of arrivals
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

import orjson

from benchmarks.load import LoadError

_EVENT = b'\ndata: {"'
_ID_FIELD = b'"id":"chatcmpl-'
_END = b"\r\n0\r\n\r\n"
"""The last chunk of a body; JSON holds no raw line breaks, so it is nothing else."""

_MARK_BYTES = max(len(_EVENT), len(_END))
_ERROR = b'data: {"error"'
_OK = b"HTTP/1.1 200 "
_MAX_WAIT_S = 60.0
_WORDS = ("time", "people", "water", "word", "number", "sound", "place", "year", "light", "thing")


@dataclass(slots=True)
class Sent:
    """One request; times are ``time.monotonic()``."""

    sent_s: float
    first_s: float = 0.0
    answer_id: str = ""


@dataclass(slots=True)
class Counts:
    """What has arrived on all streams so far."""

    tokens: int = 0
    reads: int = 0
    requests: list[Sent] = field(default_factory=list)


class _Stream(asyncio.Protocol):
    """One connection: sends a request, counts its events, and tells when it is over."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._sent = Sent(0.0)
        self._head = b""
        self._tail = b""
        self._num_tokens = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def request(self, data: bytes, num_tokens: int) -> None:
        """Send ``data`` and wait for the whole answer.

        Raises:
            LoadError: it is not a stream of ``num_tokens`` events.
        """
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._num_tokens, self._head, self._tail = 0, b"", b""
        self._sent = Sent(time.monotonic())
        self._transport.write(data)
        async with asyncio.timeout(_MAX_WAIT_S):
            await self._done
        if self._num_tokens != num_tokens:
            raise LoadError(f"{num_tokens} tokens were asked for, {self._num_tokens} events came")
        self._counts.requests.append(self._sent)

    def data_received(self, data: bytes) -> None:
        counts = self._counts
        counts.reads += 1
        if self._num_tokens == 0:
            self._head += data
            self._read_head(self._head)
        data = self._tail + data
        num_new = data.count(_EVENT)
        self._num_tokens += num_new
        counts.tokens += num_new
        if data.endswith(_END):
            self._end(None)
        # A mark may be cut by the end of a read; less than a whole one is kept, so that none
        # counts twice.
        self._tail = data[1 - _MARK_BYTES :]

    def connection_lost(self, error: Exception | None) -> None:
        self._end(LoadError(f"a connection broke: {error}"))

    def _read_head(self, head: bytes) -> None:
        """Take the answer's id from the first event, once it is there."""
        if not head.startswith(_OK) or _ERROR in head:
            self._end(LoadError(f"not a stream: {head[:300]!r}"))
        elif _EVENT in head:
            self._sent.first_s = time.monotonic()
            start = head.index(_ID_FIELD) + len(_ID_FIELD)
            self._sent.answer_id = head[start : head.index(b'"', start)].decode()

    def _end(self, error: LoadError | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


class StreamLoad:
    """``streams`` clients that ask for one answer after the other; ``stop()`` ends them."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        model: str,
        streams: int,
        prompt_words: int,
        output: int,
        max_pause_s: float,
    ) -> None:
        """Prepare.

        Args:
            host: Of the gateway.
            port: Of the gateway.
            model: For the field ``model``.
            streams: Concurrent requests.
            prompt_words: Length of the user's message; about as many tokens.
            output: Mean number of output tokens; each is between half of it and one and a half.
            max_pause_s: Pause before each request, at random up to this. Without it requests would
                come right after a step's tokens, when the gateway has most to do, and never else.
        """
        self.counts = Counts()
        self._host, self._port, self._model = host, port, model
        self._prompt_words, self._output = prompt_words, output
        self._random = random.Random(streams)
        self._num_streams = streams
        self._max_pause_s = max_pause_s
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, spread_s: float) -> None:
        """Start all streams, evenly over ``spread_s``."""
        for index in range(self._num_streams):
            delay_s = spread_s * index / self._num_streams
            self._tasks.append(asyncio.create_task(self._client(delay_s)))

    async def measure(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            LoadError: a stream failed meanwhile.
        """
        done, _ = await asyncio.wait(
            self._tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in done:
            task.result()

    async def stop(self) -> None:
        """Break off all streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _client(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        loop = asyncio.get_running_loop()
        transport, stream = await loop.create_connection(
            lambda: _Stream(self.counts), self._host, self._port
        )
        try:
            while True:
                await asyncio.sleep(self._random.uniform(0, self._max_pause_s))
                num_tokens = self._random.randint(self._output // 2, self._output * 3 // 2)
                await stream.request(self._request(num_tokens), num_tokens)
        finally:
            transport.abort()

    def _request(self, num_tokens: int) -> bytes:
        text = " ".join(self._random.choices(_WORDS, k=self._prompt_words))
        body = orjson.dumps(
            {
                "model": self._model,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "stream": True,
            }
        )
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body
