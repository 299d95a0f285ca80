"""The servers that a benchmark starts, each with its log, and never left behind."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from benchmarks.load import Api, LlamaCompletion, OpenAICompletions
from cli.child_process import ChildProcess, ChildSpec
from mesh.errors import ConfigError, Unavailable

ROOT = Path(__file__).resolve().parents[1]
"""This checkout."""

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 20.0
_HTTP_TIMEOUT_S = 2.0
_POLL_S = 0.1


class Server:
    """A running server: where it listens and how it is asked."""

    def __init__(self, name: str, url: str, api: Api, pid: int) -> None:
        self.name = name
        self.url = url
        self.api = api
        self.pid = pid

    def cpu_share(self, seconds: float) -> float:
        """Cores that the process and its children use over the next ``seconds``."""
        before_s = self.cpu_s()
        time.sleep(seconds)
        return (self.cpu_s() - before_s) / seconds

    def cpu_s(self, word: str = "") -> float:
        """CPU seconds so far of the process and its children, or of those with this argument."""
        root = psutil.Process(self.pid)
        total_s = 0.0
        for process in (root, *root.children(recursive=True)):
            if word and word not in process.cmdline():
                continue
            times = process.cpu_times()
            total_s += times.user + times.system
        return total_s


@contextmanager
def pdmesh_cluster(log_dir: Path, flags: Sequence[str]) -> Iterator[Server]:
    """``pdmesh up`` with the given flags on a free port.

    Raises:
        Unavailable: it did not come up; the text holds the end of its log.
    """
    port = free_port()
    spec = ChildSpec(
        name="pdmesh",
        argv=[sys.executable, "-P", "-m", "cli", "up", *flags, f"--port={port}"],
        env=root_env(),
    )
    with running(spec, log_dir, lambda: _answers(port, "/ready")) as child:
        url = f"http://127.0.0.1:{port}"
        yield Server("pdmesh", url, OpenAICompletions(served_model(url)), child.pid or 0)


@contextmanager
def llama_server(
    log_dir: Path, binary: str, model: Path, *, threads: int, slots: int, context: int
) -> Iterator[Server]:
    """llama.cpp's server with its shared libraries beside the binary.

    Raises:
        ConfigError: there is no such program.
        Unavailable: it did not come up; the text holds the end of its log.
    """
    program = Path(binary).expanduser()
    if not program.is_file():
        raise ConfigError(f"--compare-llama-server: {binary} does not exist")
    port = free_port()
    libraries = os.pathsep.join(
        filter(None, (str(program.resolve().parent), os.environ.get("LD_LIBRARY_PATH", "")))
    )
    spec = ChildSpec(
        name="llama-server",
        argv=[
            str(program), "-m", str(model), "-t", str(threads), "-c", str(context),
            "-np", str(slots), "--host", "127.0.0.1", "--port", str(port),
        ],
        env={"LD_LIBRARY_PATH": libraries},
    )  # fmt: skip
    with running(spec, log_dir, lambda: _answers(port, "/health")) as child:
        yield Server("llama.cpp", f"http://127.0.0.1:{port}", LlamaCompletion(), child.pid or 0)


def root_env(root: str = str(ROOT)) -> dict[str, str]:
    """Environment in which ``python -m`` finds the packages of the checkout ``root``."""
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    return {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


@contextmanager
def running(spec: ChildSpec, log_dir: Path, is_ready: Callable[[], bool]) -> Iterator[ChildProcess]:
    """A child process, from ready to stopped.

    Raises:
        Unavailable: it did not come up; the text holds the end of its log.
    """
    child = ChildProcess(spec, log_dir)
    try:
        child.start()
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not is_ready():
            if not child.running or time.monotonic() > deadline_s:
                log = "\n".join(child.last_log_lines(15))
                raise Unavailable(f"{spec.name} {child.exit_text}, not ready:\n{log}")
            time.sleep(_POLL_S)
        yield child
    finally:
        child.terminate()
        if not child.wait(_STOP_TIMEOUT_S):
            child.kill()


def served_model(url: str) -> str:
    """Name of the first model that an OpenAI-compatible server lists.

    Raises:
        Unavailable: it does not answer.
    """
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=_HTTP_TIMEOUT_S) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, LookupError) as error:
        raise Unavailable(f"{url} lists no model: {error}") from error


def _answers(port: int, path: str) -> bool:
    try:
        url = f"http://127.0.0.1:{port}{path}"
        with urllib.request.urlopen(url, timeout=_HTTP_TIMEOUT_S):
            return True
    except OSError:  # also HTTP errors: 503 while it loads
        return False


def free_port() -> int:
    """A TCP port of the loopback address that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
