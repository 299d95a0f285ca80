"""What the gateway costs: streamed tokens per second of one core, and what it adds to TTFT.

    pdmesh bench gateway                                    1, 16 and 100 streams
    pdmesh bench gateway --streams 100 --step-ms 5 --profile    … and where the time goes
    pdmesh bench gateway --compare DIR                      beside another checkout's, A B A B

The real gateway process is between two others: workers that compute nothing (every sequence gets a
token each step) and clients that only count. Both clocks are the machine's monotonic one:

    client    sent ┐                                                    ┌ first event
    gateway        └─ parse, template, tokenise, route ─┐   ┌─ format ──┘
    worker                                     received ┘ … └ first token sent
                   TTFT added = (received - sent) + (first event - first token sent)

Tokens/s a core are the tokens that arrived over the CPU time of the gateway's process, all its
threads, the handling of requests included.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.load import percentile
from benchmarks.servers import ROOT, free_port, root_env, running
from benchmarks.stream_load import StreamLoad
from benchmarks.stub_workers import StubConfig
from benchmarks.table import format_table, machine, write_json
from cli.child_process import ChildSpec
from cli.embedded_valkey import EmbeddedValkey
from cli.flags import REDIS_URL_VARIABLE
from cli.gateway_client import GatewayClient
from cli.roles import PARENT_VARIABLE
from mesh.errors import ConfigError

_MODEL = "stub"
_HOST = "127.0.0.1"
_PROFILE_LINES = 30
_SETTLE_S = 1.0
_PAUSE_STEPS = 2
_HEADINGS = (
    "streams", "step ms", "gateway", "tok/s", "cores", "tok/s a core", "µs a token",
    "tokens a read", "TTFT added p50 ms", "p99", "to worker p50 ms", "back p50 ms",
)  # fmt: skip


class Kind(NamedTuple):
    """What a run is a run of."""

    streams: int
    step_ms: float
    name: str
    root: str
    """The checkout whose gateway runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What came of a run."""

    tokens_per_s: float
    gateway_cores: float
    tokens_per_core_s: float
    cpu_us_per_token: float
    tokens_per_read: float
    """1: each token came to the client by itself."""
    ttft_added_p50_ms: float
    ttft_added_p99_ms: float
    to_worker_p50_ms: float
    back_p50_ms: float


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and print its table."""
    summary, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="pdmesh bench gateway",
        description=summary,
        epilog=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--streams", default="1,16,100", help="concurrent streams (default: 1,16,100)")
    add("--step-ms", default="5,20", help="between two tokens of a stream (default: 5,20)")
    add("--seconds", type=float, default=5.0, help="measured time of a run (default: 5)")
    add("--output", type=int, default=128, help="mean output tokens (default: 128)")
    add("--prompt-words", type=int, default=100, help="words of a message (default: 100)")
    add("--rounds", type=int, default=1, help="runs of each kind (default: 1)")
    add("--compare", default="", metavar="DIR", help="a checkout whose gateway takes turns")
    add("--profile", action="store_true", help="run the gateway in cProfile, print the top")
    add("--json", default="", metavar="FILE", help="write every run's figures there")
    options = parser.parse_args(argv)
    print(machine())
    kinds = [
        Kind(int(streams), float(step_ms), name, root)
        for step_ms in options.step_ms.split(",")
        for streams in options.streams.split(",")
        for name, root in _roots(options.compare).items()
    ]
    costs: dict[Kind, list[Cost]] = {}
    with tempfile.TemporaryDirectory(prefix="pdmesh-bench-") as folder:
        valkey = EmbeddedValkey(Path(folder))
        valkey.start()
        try:
            for kind in kinds * options.rounds:
                cost = _run(Path(folder), valkey.url, options, kind)
                costs.setdefault(kind, []).append(cost)
                print(
                    f"{kind.streams} streams, {kind.step_ms:g} ms a step, {kind.name}: "
                    f"{cost.tokens_per_core_s:.0f} tok/s a core",
                    flush=True,
                )
        finally:
            valkey.stop()
    print(f"\nmedian of {options.rounds} rounds\n")
    print(_report(costs))
    if options.json:
        runs = [kind._asdict() | asdict(cost) for kind, runs in costs.items() for cost in runs]
        write_json(options.json, {"machine": machine(), "options": vars(options), "runs": runs})
    return 0


def _roots(compare: str) -> dict[str, str]:
    roots = {"this": str(ROOT)}
    if compare:
        if not (Path(compare) / "gateway" / "main.py").is_file():
            raise ConfigError(f"--compare: {compare} is no checkout of pdmesh")
        roots["other"] = str(Path(compare).resolve())
    return roots


def _report(costs: Mapping[Kind, Sequence[Cost]]) -> str:
    rows: list[list[object]] = []
    medians: dict[Kind, list[float]] = {}
    for kind, runs in costs.items():
        columns = zip(*(asdict(cost).values() for cost in runs), strict=True)
        medians[kind] = [statistics.median(column) for column in columns]
        rows.append([kind.streams, kind.step_ms, kind.name, *medians[kind]])
        mine = next(k for k in costs if k[:2] == kind[:2])
        if kind != mine:
            ratios = [a / b for a, b in zip(medians[mine], medians[kind], strict=True)]
            rows.append([kind.streams, kind.step_ms, f"{mine.name} / {kind.name}", *ratios])
    return format_table(_HEADINGS, rows)


def _run(folder: Path, redis_url: str, options: argparse.Namespace, kind: Kind) -> Cost:
    stamps, profile = folder / "stamps", folder / "profile"
    stamps.unlink(missing_ok=True)
    registry = {REDIS_URL_VARIABLE: redis_url}
    stub = msgspec.json.encode(
        StubConfig(
            redis_url_variable=REDIS_URL_VARIABLE,
            parent_pid=os.getpid(),
            served_model_name=_MODEL,
            step_s=kind.step_ms / 1000,
            stamps_file=str(stamps),
        )
    ).decode()
    port = free_port()
    profiler = ["-m", "cProfile", "-o", str(profile)] if options.profile else []
    workers = ChildSpec(
        name="workers",
        argv=[sys.executable, "-P", "-m", "benchmarks.stub_workers", stub],
        env=registry | root_env(),
    )
    gateway = ChildSpec(
        name="gateway",
        argv=[
            sys.executable, "-P", *profiler, "-m", "cli", "gateway", f"--port={port}",
            f"--served-model-name={_MODEL}", "--log-level=warning",
        ],
        env=registry | root_env(kind.root) | {PARENT_VARIABLE: str(os.getpid())},
    )  # fmt: skip
    ask = GatewayClient(f"http://{_HOST}:{port}")
    with running(workers, folder, stamps.exists), running(gateway, folder, ask.is_ready) as child:
        load = StreamLoad(
            _HOST, port, model=_MODEL, streams=kind.streams, prompt_words=options.prompt_words,
            output=options.output, max_pause_s=_PAUSE_STEPS * kind.step_ms / 1000,
        )  # fmt: skip
        window = asyncio.run(_measure(load, child.pid or 0, options, kind.step_ms / 1000))
    if options.profile:
        pstats.Stats(str(profile)).sort_stats("tottime").print_stats(_PROFILE_LINES)
    return _cost(load, window, _read_stamps(stamps))


@dataclass(slots=True)
class _Window:
    """The measured time: how much of everything it saw."""

    start_s: float
    seconds: float = 0.0
    cpu_s: float = 0.0
    tokens: int = 0
    reads: int = 0

    @contextmanager
    def open(self, load: StreamLoad, pid: int) -> Iterator[None]:
        counts = load.counts
        tokens, reads, cpu_s = counts.tokens, counts.reads, cpu_time_s(pid)
        yield
        self.seconds = time.monotonic() - self.start_s
        self.cpu_s = cpu_time_s(pid) - cpu_s
        self.tokens, self.reads = counts.tokens - tokens, counts.reads - reads


async def _measure(
    load: StreamLoad, pid: int, options: argparse.Namespace, step_s: float
) -> _Window:
    answer_s = options.output * step_s
    load.start(answer_s)
    try:
        await load.measure(answer_s + _SETTLE_S)
        window = _Window(time.monotonic())
        with window.open(load, pid):
            await load.measure(options.seconds)
    finally:
        await load.stop()
    return window


def _cost(load: StreamLoad, window: _Window, stamps: dict[str, tuple[float, float]]) -> Cost:
    to_worker, back = [], []
    for sent in load.counts.requests:
        if sent.sent_s >= window.start_s:
            received_s, first_s = stamps[sent.answer_id]
            to_worker.append((received_s - sent.sent_s) * 1000)
            back.append((sent.first_s - first_s) * 1000)
    added = [there + again for there, again in zip(to_worker, back, strict=True)]
    return Cost(
        tokens_per_s=window.tokens / window.seconds,
        gateway_cores=window.cpu_s / window.seconds,
        tokens_per_core_s=window.tokens / window.cpu_s,
        cpu_us_per_token=window.cpu_s / window.tokens * 1e6,
        tokens_per_read=window.tokens / window.reads,
        ttft_added_p50_ms=percentile(added, 50),
        ttft_added_p99_ms=percentile(added, 99),
        to_worker_p50_ms=percentile(to_worker, 50),
        back_p50_ms=percentile(back, 50),
    )


def _read_stamps(file: Path) -> dict[str, tuple[float, float]]:
    stamps = {}
    for line in file.read_text().splitlines():
        request_id, received_s, sent_s = line.split()
        # A request's first choice, which is its only one.
        stamps[request_id.removesuffix("-0")] = (float(received_s), float(sent_s))
    return stamps


def cpu_time_s(pid: int) -> float:
    """User and system time of a process, all its threads."""
    # proc(5): the name in parentheses may hold blanks; utime and stime are fields 14 and 15.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
