"""Clients that send too much or too slowly, or do not read: bounded in size and time."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from gateway import client_writer, request_body, server_state
from gateway.observe import request_metrics
from gateway.prompts.served_model import ServedModel
from tests.unit.gateway.client import CHAT, COMPLETIONS, MESSAGES, Client
from tests.unit.gateway.scripted_cluster import Script, ScriptedCluster, wait_until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


def dropped() -> float:
    [family] = request_metrics._FAILED.labels(code="slow_reader").collect()
    return family.samples[0].value


@asynccontextmanager
async def connected(
    cluster: ScriptedCluster, *, receive_bytes: int = 1 << 20
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare connection whose reader takes nothing that is not asked for."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.setblocking(False)
    address = ("127.0.0.1", int(cluster.url.rpartition(":")[2]))
    await asyncio.get_running_loop().sock_connect(connection, address)
    reader, writer = await asyncio.open_connection(sock=connection, limit=receive_bytes)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_a_body_that_does_not_come_is_408(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(request_body, "MAX_BODY_S", 0.1)
    async with connected(cluster) as (reader, writer):
        writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{" % path.encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in head.lower()
        assert b'"code":"request_timeout"' in await reader.readuntil(b"}}")
        assert cluster.server.num_open_requests == 0


async def test_headers_that_do_not_end_are_given_up(model: ServedModel) -> None:
    cluster = ScriptedCluster(model, idle_timeout_s=0.2)
    await cluster.start()
    async with connected(cluster) as (reader, writer):
        writer.write(HEAD + b"X-Slow: ")
        closed = asyncio.create_task(reader.read())
        async with asyncio.timeout(60):
            while not closed.done():
                writer.write(b"a")
                await asyncio.sleep(0.02)
        with suppress(ConnectionError):  # what comes after the end is reset
            assert await closed == b""
    await cluster.close()


@pytest.mark.parametrize(
    "headers",
    [b"X-Long: %s\r\n" % (b"a" * 9000), b"".join(b"X-%d: a\r\n" % i for i in range(200))],
    ids=["long", "many"],
)
async def test_too_large_headers_are_400(cluster: ScriptedCluster, headers: bytes) -> None:
    async with connected(cluster) as (reader, writer):
        writer.write(HEAD + headers + b"Content-Length: 2\r\n\r\n{}")
        assert (await reader.readline()).split()[1] == b"400"


async def test_a_packed_body_counts_unpacked(client: Client, cluster: ScriptedCluster) -> None:
    await cluster.pair(Script())
    await cluster.show_all()
    body = gzip.compress(b'{"prompt": "' + b"a" * (50 << 20) + b'"}')
    assert len(body) < 1 << 20
    status, answer = await client.post(COMPLETIONS, body, headers={"Content-Encoding": "gzip"})
    assert (status, answer["error"]["code"]) == (413, "payload_too_large")


async def test_bodies_on_their_way_in_are_bounded_together(
    client: Client, cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_state, "MAX_RECEIVING_BYTES", 1000)
    async with connected(cluster) as (_, first), connected(cluster) as (_, second):
        for writer in (first, second):
            writer.write(HEAD + b"Content-Length: 450\r\n\r\n{")
        await wait_until(lambda: cluster.server.receiving_bytes == 900)
        status, body = await client.post("/tokenize", {"prompt": "a" * 100})
        assert (status, body["error"]["code"]) == (429, "overloaded")
        assert (await client.post("/tokenize", {"prompt": "a"}))[0] == 200
    await wait_until(lambda: cluster.server.receiving_bytes == 0)
    assert (await client.post("/tokenize", {"prompt": "a" * 100}))[0] == 200


@pytest.mark.parametrize(
    "rest",
    [
        b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
        b"Content-Encoding: deflate\r\nContent-Length: 2\r\n\r\n{}",
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}",
    ],
)
async def test_a_broken_encoding_is_400(cluster: ScriptedCluster, rest: bytes) -> None:
    async with connected(cluster) as (reader, writer):
        writer.write(HEAD + rest)
        assert (await reader.readline()).split()[1] == b"400"
        await reader.read()  # and the connection is closed


async def test_too_many_messages_and_stops(client: Client) -> None:
    for fields, param in (
        ({"messages": MESSAGES * 4097}, "messages"),
        ({"messages": MESSAGES, "stop": ["a"] * 5}, "stop"),
        ({"messages": MESSAGES, "stop": "a" * 1025}, "stop"),
    ):
        status, body = await client.post(CHAT, fields)
        assert (status, body["error"]["param"]) == (400, param)


@pytest.fixture
async def decode_cluster(cluster: ScriptedCluster) -> ScriptedCluster:
    _, decode = await cluster.pair(Script(answer=[28]))
    decode.script = Script(answer=[28], burst=200, delay_s=0.02)
    await cluster.show_all()
    return cluster


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_reader_that_stalls_is_dropped(
    decode_cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Also when the whole answer is made: nobody may keep megabytes by not reading."""
    cluster = decode_cluster
    dropped_before = dropped()
    monkeypatch.setattr(client_writer, "MAX_STALL_S", 0.3)
    fields = {"prompt": "a", "max_tokens": 4000, "logprobs": 20, "stream": stream, "n": 4}
    body = json.dumps(fields).encode()
    async with connected(cluster, receive_bytes=4096) as (_, writer):
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        decode = cluster.workers[1]
        await wait_until(lambda: bool(decode.seen.requests))
        await wait_until(lambda: cluster.server.num_open_requests == 0, timeout_s=200)
        assert all(not worker.attempts for worker in cluster.cluster.workers)
        await wait_until(lambda: decode.num_running == 0)
    assert dropped() == dropped_before + 1


async def test_a_large_answer_comes_whole(decode_cluster: ScriptedCluster) -> None:
    async with connected(decode_cluster) as (reader, writer):
        body = json.dumps({"prompt": "a", "max_tokens": 3000, "logprobs": 5}).encode()
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        head = await reader.readuntil(b"\r\n\r\n")
        [size] = [
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length")
        ]
        assert size > 1 << 17
        answer = json.loads(await reader.readexactly(size))
        assert answer["usage"]["completion_tokens"] == 3000
