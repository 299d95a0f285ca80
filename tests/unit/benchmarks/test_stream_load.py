"""The cheap load generator counts what was sent, however it was cut."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import orjson
import pytest

from benchmarks.load import LoadError
from benchmarks.stream_load import StreamLoad

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(data: bytes) -> bytes:
    """One event in a chunk of its own."""
    line = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(line), line)


def stream(num_tokens: int) -> bytes:
    """A whole response."""
    token = b'{"id":"chatcmpl-abc","choices":[{"delta":{"content":"data: {"}}]}'
    return HEAD + event(token) * num_tokens + event(b"[DONE]") + b"0\r\n\r\n"


@asynccontextmanager
async def server(answer: Callable[[int], bytes], cut: int) -> AsyncIterator[int]:
    """Answers every request in pieces of ``cut`` bytes after the first event; yields the port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()
                return
            length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
            data = answer(orjson.loads(await reader.readexactly(length))["max_tokens"])
            whole = data.index(b"\n\n\r\n") + 4 if b"\n\n\r\n" in data else len(data)
            writer.write(data[:whole])
            for start in range(whole, len(data), cut):
                writer.write(data[start : start + cut])
                await asyncio.sleep(0)

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1]


def stream_load(port: int, *, streams: int) -> StreamLoad:
    return StreamLoad(
        "127.0.0.1", port, model="m", streams=streams, prompt_words=5, output=6, max_pause_s=0.001
    )


@pytest.mark.parametrize("cut", [1, 5, 7, 64, 100_000])
async def test_every_event_counts_once(cut: int) -> None:
    async with server(stream, cut) as port:
        load = stream_load(port, streams=3)
        load.start(0.0)
        async with asyncio.timeout(60):
            while len(load.counts.requests) < 12:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await load.stop()
    assert {sent.answer_id for sent in load.counts.requests} == {"abc"}
    assert all(sent.sent_s < sent.first_s for sent in load.counts.requests)
    assert load.counts.tokens >= 3 * len(load.counts.requests)
    assert load.counts.reads >= len(load.counts.requests)


@pytest.mark.parametrize(
    "answer",
    [
        lambda n: stream(n - 1),
        lambda n: stream(n + 1),
        lambda n: HEAD + event(b'{"error":{"message":"lost"}}') + b"0\r\n\r\n",
        lambda n: b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
        lambda n: stream(n).replace(b"[DONE]", b'{"error":{}}'),
    ],
    ids=["too few", "too many", "an error alone", "refused", "an error at the end"],
)
async def test_a_wrong_answer_fails_the_run(answer: Callable[[int], bytes]) -> None:
    async with server(answer, 1000) as port:
        load = stream_load(port, streams=1)
        load.start(0.0)
        with pytest.raises(LoadError):
            await load.measure(10)
        await load.stop()
