"""``pdmesh up`` as users run it: real processes, the real model, and nothing left behind."""

import json
import os
import re
import signal
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.up_process import Up, wait_until

_START_TIMEOUT_S = 300.0


def chat(url: str) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": "Name a colour."}],
        "model": json.load(urllib.request.urlopen(f"{url}/v1/models", timeout=60))["data"][0]["id"],
        "max_tokens": 8,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=240) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=60) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def test_a_cluster_lives_heals_and_leaves_nothing(start: Callable[..., Up]) -> None:
    up = start("--port", "0", "--kv-memory-mib", "64")
    url = up.read_url()
    children = up.children()
    assert set(children) == {"valkey", "gateway", "prefill-0", "decode-0"}
    assert chat(url)["choices"][0]["message"]["content"]

    for victim in ("decode-0", "gateway", "valkey"):
        os.kill(children[victim], signal.SIGKILL)
        wait_until(lambda v=victim: up.children().get(v, children[v]) != children[v])
        wait_until(lambda: is_ready(url), _START_TIMEOUT_S)
        assert chat(url)["choices"][0]["message"]["content"]
    errors = up.errors.read_text()
    for victim in ("decode-0", "gateway", "valkey"):
        assert f"{victim}: was killed by SIGKILL, restart in" in errors
        assert f"{victim}: restarting (1)" in errors
    assert re.search(r"kernels for [a-z0-9-]+, KV transport auto", errors)
    assert f"curl -s {url}/v1/chat/completions" in errors

    up.children()
    up.process.send_signal(signal.SIGINT)
    code, rest_of_stdout, _ = up.finish(timeout_s=100)
    assert (code, rest_of_stdout) == (0, "")
    assert up.left() == []
    assert list(up.temp.glob("pdmesh-*")) == []


def test_sigterm_mid_stream_leaves_nothing(start: Callable[..., Up]) -> None:
    up = start("--port", "0", "--kv-memory-mib", "64", "--prefill", "2", "--decode", "2")
    url = up.read_url()
    assert len(up.children()) == 6
    body = {"prompt": "Once", "max_tokens": 2800, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.readline().startswith(b"data: ")
        up.process.send_signal(signal.SIGTERM)
        rest = response.read()
    # Told so after the time it was given, and never ended as if the answer were whole.
    assert b'"finish_reason":"' not in rest
    last = json.loads(rest.rstrip().rpartition(b"\n")[2].removeprefix(b"data: "))
    assert last["error"]["message"] == "the gateway is shutting down"
    code, rest_of_stdout, errors = up.finish(timeout_s=100)
    assert "did not stop" not in errors
    assert (code, rest_of_stdout) == (0, "")
    assert up.left() == []


def test_killing_up_kills_its_children(start: Callable[..., Up]) -> None:
    up = start("--port", "0")
    wait_until(lambda: len(up.children()) == 4)
    # The roles ask the kernel for it first thing, still before they import their parts.
    wait_until(lambda: _has_numpy(up.children()["prefill-0"]))
    up.process.kill()
    up.process.wait()
    wait_until(lambda: up.left() == [])


def test_a_second_signal_kills_at_once(start: Callable[..., Up]) -> None:
    up = start("--port", "0")
    wait_until(lambda: len(up.children()) == 4)
    for pid in up.children().values():
        os.kill(pid, signal.SIGSTOP)  # none of them will obey a SIGTERM
    up.process.send_signal(signal.SIGINT)
    wait_until(lambda: "stopping" in up.errors.read_text())
    up.process.send_signal(signal.SIGINT)
    code, _, errors = up.finish(timeout_s=100)
    assert code == 130
    assert "did not stop" not in errors, "it has not waited for them"
    assert up.left() == []


def test_a_port_in_use_is_told_before_anything_starts(start: Callable[..., Up]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, errors = start("--port", str(port)).finish(timeout_s=100)
    assert (code, out) == (1, "")
    assert errors == (
        f"pdmesh up: error: --port: cannot bind 127.0.0.1:{port}: Address already in use\n"
    )


def test_a_child_that_cannot_start_is_told_with_its_cause(
    start: Callable[..., Up], tmp_path: Path
) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"GGUF but not really")
    up = start("--port", "0", "--model", str(model))
    code, out, errors = up.finish(timeout_s=300)
    assert (code, out) == (1, "")
    assert "pdmesh up: error:" in errors
    assert "broken.gguf" in errors
    assert up.left() == []


def _has_numpy(pid: int) -> bool:
    return "numpy" in Path(f"/proc/{pid}/maps").read_text()
