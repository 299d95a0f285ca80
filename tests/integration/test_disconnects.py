"""A client that leaves frees everything that was held for it."""

from __future__ import annotations

import json
import random
import re
import socket
import struct
import time
import urllib.request
from urllib.parse import urlsplit

import pytest

from tests.integration.conftest import on
from tests.integration.running_cluster import RunningCluster
from tests.integration.up_process import wait_until

_NUM_DISCONNECTS = 50
_RST_ON_CLOSE = struct.pack("ii", 1, 0)


class _RawClient:
    """One HTTP request over a bare socket, so that the test decides when and how it breaks."""

    def __init__(self, cluster: RunningCluster, *, num_prompt_tokens: int, stream: bool) -> None:
        address = urlsplit(cluster.url)
        fields = {
            "prompt": random.choices(range(10, 40_000), k=num_prompt_tokens),
            "max_tokens": 500,
            "ignore_eos": True,
            "stream": stream,
        }
        body = json.dumps(fields).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._socket = socket.create_connection((address.hostname, address.port), timeout=30)
        self._socket.sendall(head.encode() + body)

    def read_events(self, count: int) -> None:
        """Read until ``count`` events came."""
        data = b""
        while data.count(b"data: ") < count:
            received = self._socket.recv(1 << 16)
            assert received, data
            data += received

    def leave(self, *, reset: bool) -> None:
        """Close the connection in good order, or break it."""
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST_ON_CLOSE)
        self._socket.close()


def _num_open(cluster: RunningCluster) -> float:
    text = urllib.request.urlopen(f"{cluster.url}/metrics", timeout=10).read().decode()
    match = re.search(r"^pdmesh:gateway_open_requests(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
    assert match is not None
    return float(match[1])


@on("int8-1p1d")
def test_fifty_streams_left_at_different_moments(cluster: RunningCluster) -> None:
    slowest_s = 0.0
    num_before_first_token = 0
    for turn in range(_NUM_DISCONNECTS):
        client = _RawClient(cluster, num_prompt_tokens=(8, 17, 200, 700)[turn % 4], stream=True)
        if turn % 5 < 2:  # before the first token: while it is admitted, queued or computed
            num_before_first_token += 1
            time.sleep(0.015 * (turn % 7))
        else:
            client.read_events(1 + turn % 6)
        client.leave(reset=turn % 2 == 0)
        slowest_s = max(slowest_s, cluster.wait_idle(2.0))
    assert num_before_first_token == 20
    wait_until(lambda: _num_open(cluster) == 0, 2)
    print(f"slowest return of the census: {1000 * slowest_s:.0f} ms")


@on("int8-1p1d")
def test_sixteen_leave_at_once(cluster: RunningCluster) -> None:
    clients = [_RawClient(cluster, num_prompt_tokens=40, stream=True) for _ in range(16)]
    for client in clients[::2]:
        client.read_events(2)
    for client in clients:
        client.leave(reset=False)
    cluster.wait_idle(2.0)
    wait_until(lambda: _num_open(cluster) == 0, 2)


@on("int8-1p1d")
@pytest.mark.parametrize("num_prompt_tokens", [8, 700])
def test_leaving_without_stream(cluster: RunningCluster, num_prompt_tokens: int) -> None:
    for reset in (False, True):
        client = _RawClient(cluster, num_prompt_tokens=num_prompt_tokens, stream=False)
        wait_until(lambda: any(held["running"] for held in cluster.census().values()), 5)
        client.leave(reset=reset)
        cluster.wait_idle(2.0)
        wait_until(lambda: _num_open(cluster) == 0, 2)
