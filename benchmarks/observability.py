"""What metrics and tracing cost: tokens/s with both, over tokens/s of a cluster with neither.

Two clusters run side by side and are loaded in turn, so that both see the same machine. ``off`` has
the metrics' methods replaced by ones that do nothing; ``on`` is as shipped, traced with a span for
every part of every request to a collector in this process, and scraped every 5 s. CPU time per
output token is shown as well: other work on the machine disturbs it less.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.load import run_load
from benchmarks.servers import Server, pdmesh_cluster
from benchmarks.table import format_table, machine
from benchmarks.workload import random_prompts
from cli.gateway_client import GatewayClient

_SILENCE = """
import prometheus_client
def nothing(self, *_): pass
prometheus_client.Counter.inc = prometheus_client.Gauge.set = nothing
prometheus_client.Histogram.observe = nothing
"""
_SCRAPE_S = 5.0
_HEADINGS = (
    "round", "off tok/s", "on tok/s", "off CPU ms", "on CPU ms", "off gateway ms", "on gateway ms",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="pdmesh bench observability", description=__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=10, help="pairs of runs (default: 10)")
    add("--clients", type=int, default=8)
    add("--requests", type=int, default=24, help="of each run (default: 24)")
    add("--prompt", type=int, default=64, help="tokens (default: 64)")
    add("--output", type=int, default=48, help="tokens (default: 48)")
    options = parser.parse_args(argv)
    print(machine())
    flags = ["--kv-memory-mib=128"]
    with (
        tempfile.TemporaryDirectory() as folder,
        _collector() as endpoint,
        _without_metrics(Path(folder) / "silent", flags) as off,
        pdmesh_cluster(_made(folder, "on"), [*flags, f"--otlp-endpoint={endpoint}"]) as on,
        _scraped(on.url),
    ):
        rows, speeds, costs, gateways = [], [], [], []
        for index in range(-1, options.rounds):
            order = (off, on) if index % 2 else (on, off)
            runs = {server.url: _run(server, options, index) for server in order}
            if index < 0:
                continue  # warm-up
            without, with_all = runs[off.url], runs[on.url]
            speeds.append(with_all.tokens_per_s / without.tokens_per_s)
            costs.append(with_all.cpu_ms / without.cpu_ms)
            gateways.append((with_all.gateway_ms - without.gateway_ms) / without.cpu_ms)
            rows.append([
                index, without.tokens_per_s, with_all.tokens_per_s, without.cpu_ms,
                with_all.cpu_ms, without.gateway_ms, with_all.gateway_ms,
            ])  # fmt: skip
    print(format_table(_HEADINGS, rows))
    print(f"\ntokens/s, on / off: {_spread(speeds)}")
    print(f"CPU per token, on / off: {_spread(costs)}")
    print(f"more CPU on the gateway, of all CPU per token: {_spread(gateways)}")
    return 0


class _Run(NamedTuple):
    tokens_per_s: float
    cpu_ms: float
    """Of all processes, per output token."""
    gateway_ms: float
    """Of the gateway alone; its one thread does not spin, so that this varies least."""


def _run(server: Server, options: argparse.Namespace, index: int) -> _Run:
    prompts = random_prompts(options.requests, options.prompt, seed=(server.url, index))
    before = server.cpu_s(), server.cpu_s("gateway")
    result = asyncio.run(
        run_load(
            server.url, server.api, prompts, clients=options.clients, num_output=options.output
        )
    )
    after = server.cpu_s(), server.cpu_s("gateway")
    all_ms, gateway_ms = (
        1000 * (end_s - start_s) / (options.requests * options.output)
        for start_s, end_s in zip(before, after, strict=True)
    )
    return _Run(result.output_tokens_per_s, all_ms, gateway_ms)


def _spread(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return f"median {middle:.3f}, quartiles {low:.3f} to {high:.3f}"


def _made(folder: str, name: str) -> Path:
    path = Path(folder) / name
    path.mkdir()
    return path


@contextmanager
def _without_metrics(folder: Path, flags: Sequence[str]) -> Iterator[Server]:
    """A cluster whose processes import a module that silences the metrics' methods."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SILENCE)
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), before)))
    try:
        with pdmesh_cluster(folder, flags) as server:
            os.environ["PYTHONPATH"] = before
            yield server
    finally:
        os.environ["PYTHONPATH"] = before


class _Sink(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def _collector() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Sink)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def _scraped(url: str) -> Iterator[None]:
    """Fetch the metrics of every process of a cluster again and again."""
    stop = threading.Event()
    census = GatewayClient(url).census() or []
    urls = [url, *(str(worker["http_endpoint"]) for worker in census)]

    def scrape() -> None:
        while not stop.wait(_SCRAPE_S):
            for endpoint in urls:
                with urllib.request.urlopen(f"{endpoint}/metrics", timeout=5) as answer:
                    answer.read()

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
