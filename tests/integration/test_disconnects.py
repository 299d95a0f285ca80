"""A client that leaves frees everything that was held for it."""

from __future__ import annotations

import itertools
import json
import random
import re
import socket
import statistics
import struct
import time
import urllib.request
from urllib.parse import urlsplit

import pytest

from tests.integration.conftest import on
from tests.integration.running_cluster import RunningCluster
from tests.integration.up_process import wait_until

_NUM_DISCONNECTS = 50
_PROMPT_LENGTHS = (8, 17, 200, 700)
_RELEASE_S = 0.1
"""After a client has left, beside one step, until nothing is held for it."""
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
        self._socket = socket.create_connection((address.hostname, address.port), timeout=240)
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


def _bound_s(cluster: RunningCluster) -> float:
    """What a client's leave may take, by this machine's speed just now."""
    asked_s = time.monotonic()
    for _ in range(5):
        cluster.census()
    census_s = (time.monotonic() - asked_s) / 5  # asked over and over while it is waited for
    return _RELEASE_S + cluster.measure_step_s() + 2 * census_s


def _num_open(cluster: RunningCluster) -> float:
    text = urllib.request.urlopen(f"{cluster.url}/metrics", timeout=60).read().decode()
    match = re.search(r"^pdmesh:gateway_open_requests(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
    assert match is not None
    return float(match[1])


@pytest.mark.timeout(1800)  # it computes 8000 tokens of prompts
@on("int8-1p1d")
def test_fifty_streams_left_at_different_moments(cluster: RunningCluster) -> None:
    bound_s = _bound_s(cluster)
    prefilling: dict[int, list[float]] = {length: [] for length in _PROMPT_LENGTHS}
    decoding: list[float] = []
    for turn in range(_NUM_DISCONNECTS):
        length = _PROMPT_LENGTHS[turn % 4]
        client = _RawClient(cluster, num_prompt_tokens=length, stream=True)
        if turn % 5 < 2:  # before the first token: while it is admitted, queued or computed
            time.sleep(0.015 * (turn % 7))
            taken_s = prefilling[length]
        else:
            client.read_events(1 + turn % 6)
            taken_s = decoding
        client.leave(reset=turn % 2 == 0)
        taken_s.append(cluster.wait_idle())
    assert sum(map(len, prefilling.values())) == 20
    wait_until(lambda: _num_open(cluster) == 0)
    # Of each kind the one in the middle: the machine may be busy with something else.
    medians_s = [statistics.median(taken_s) for taken_s in (*prefilling.values(), decoding)]
    slowest_s = max(*decoding, *itertools.chain(*prefilling.values()))
    print(
        f"the census returned within {1000 * max(medians_s):.0f} ms as a rule, "
        f"{1000 * slowest_s:.0f} ms at most; bound {1000 * bound_s:.0f} ms"
    )
    assert max(medians_s) <= bound_s, (medians_s, bound_s)


@on("int8-1p1d")
def test_sixteen_leave_at_once(cluster: RunningCluster) -> None:
    clients = [_RawClient(cluster, num_prompt_tokens=40, stream=True) for _ in range(16)]
    for client in clients[::2]:
        client.read_events(2)
    for client in clients:
        client.leave(reset=False)
    cluster.wait_idle()
    wait_until(lambda: _num_open(cluster) == 0)


@on("int8-1p1d")
@pytest.mark.parametrize("num_prompt_tokens", [8, 700])
def test_leaving_without_stream(cluster: RunningCluster, num_prompt_tokens: int) -> None:
    for reset in (False, True):
        client = _RawClient(cluster, num_prompt_tokens=num_prompt_tokens, stream=False)
        wait_until(lambda: any(held["running"] for held in cluster.census().values()))
        client.leave(reset=reset)
        cluster.wait_idle()
        wait_until(lambda: _num_open(cluster) == 0)
