"""``pdmesh up``: a whole cluster on this machine, in the foreground until Ctrl-C.

    start ──> wait until the gateway's /ready ──> print how to use it ──> supervise ──> stop

The first SIGINT, SIGTERM or SIGHUP stops in good order, the second kills at once. Should this
process itself be killed, the kernel kills its children (``mesh.parent_watch``).
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from cli.gateway_client import GatewayClient
from cli.kernel_progress import KernelProgress
from cli.local_cluster import LocalCluster
from cli.progress import Progress
from mesh.errors import ConfigError, PdmeshError, Unavailable

_POLL_INTERVAL_S = 0.1
_NUM_LOG_LINES = 15
_INTERRUPTED_EXIT_CODE = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _KilledAtOnce(Exception):
    """A second signal came while the first was being obeyed."""


class _StopSignal:
    """Remembers the first signal, raises at the second, is deaf from then on."""

    def __init__(self) -> None:
        self.num_received = 0

    @property
    def received(self) -> bool:
        return self.num_received > 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.num_received += 1
        if self.num_received == 2:
            raise _KilledAtOnce


def run_up(options: argparse.Namespace) -> int:
    """Run the cluster; returns the exit code.

    Raises:
        ConfigError: a flag, the model or the port cannot be used.
        Unavailable: a process did not start; the text holds the end of its log.
    """
    stop = _StopSignal()
    for number in _SIGNALS:
        signal.signal(number, stop)
    progress = Progress()
    try:
        _run(options, progress, stop)
    except _KilledAtOnce:
        return _INTERRUPTED_EXIT_CODE
    return 0


def _run(options: argparse.Namespace, progress: Progress, stop: _StopSignal) -> None:
    with _run_dir(options.log_dir) as run_dir:
        cluster = LocalCluster(options, run_dir, progress.show)
        try:
            with progress:
                _start(cluster)
                _wait_until_ready(cluster, progress, stop, options.start_timeout_s)
            if not stop.received:
                _tell_how_to_use(cluster, progress, run_dir)
            while not stop.received:
                time.sleep(_POLL_INTERVAL_S)
                cluster.supervisor.echo_errors()
                cluster.supervisor.poll()
            progress.show("stopping")
        finally:
            if stop.num_received < 2:
                cluster.stop()
            cluster.supervisor.kill()


def _start(cluster: LocalCluster) -> None:
    try:
        cluster.start()
    except OSError as error:
        raise Unavailable(f"cannot start a process: {error}") from error


def _wait_until_ready(
    cluster: LocalCluster, progress: Progress, stop: _StopSignal, timeout_s: float
) -> None:
    client = GatewayClient(cluster.url)
    kernels = KernelProgress(cluster.workers)
    awaited = {config.worker_id for config in cluster.worker_configs}
    gateway_up = False
    deadline_s = time.monotonic() + timeout_s
    while not stop.received:
        ended = cluster.supervisor.first_ended()
        if ended is not None:
            lines = ended.last_log_lines(_NUM_LOG_LINES)
            cause = f": {lines[-1]}" if lines else ""
            log = "".join(f"\n  [{ended.spec.name}] {line}" for line in lines)
            raise Unavailable(f"{ended.spec.name} {ended.exit_text}{cause}{log}")
        if not gateway_up and client.is_listening():
            gateway_up = True
            progress.show(f"gateway up ({progress.elapsed_s:.1f} s)")
        if gateway_up:
            for worker_id in _alive(client.census()) & awaited:
                awaited.remove(worker_id)
                progress.show(f"{worker_id} up ({progress.elapsed_s:.1f} s)")
            if not awaited and client.is_ready():
                return
        waits_for = sorted(awaited) + ([] if gateway_up else ["gateway"])
        compiling = kernels.poll(progress)
        progress.pending(compiling or f"starting {', '.join(waits_for) or 'links'}")
        if time.monotonic() > deadline_s:
            names = ", ".join(waits_for) or "links between the processes"
            text = f"not ready after {timeout_s:g} s; still waiting for {names}"
            raise Unavailable(f"{text} ({compiling})" if compiling else text)
        time.sleep(_POLL_INTERVAL_S)


def _alive(census: list[dict[str, Any]] | None) -> set[str]:
    return {str(worker.get("id")) for worker in census or () if worker.get("alive")}


def _tell_how_to_use(cluster: LocalCluster, progress: Progress, run_dir: Path) -> None:
    census = GatewayClient(cluster.url).census() or []
    transports = sorted({str(worker.get("transport")) for worker in census})
    model = str(census[0].get("model")) if census else "MODEL"
    levels = sorted({str(worker["cpu_level"]) for worker in census if worker.get("cpu_level")})
    kernels = f"kernels for {', '.join(levels)}, " if levels else ""
    progress.show(
        f"model {model}, {kernels}KV transport {', '.join(transports)}, logs in {run_dir}"
    )
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    progress.show(
        f"try: curl -s {cluster.url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d '{body}'"
    )
    print(f"ready {cluster.url}", flush=True)


@contextlib.contextmanager
def _run_dir(log_dir: str) -> Iterator[Path]:
    """The logs' folder: the given one, or a temporary one that is kept only after a failure."""
    if log_dir:
        path = Path(log_dir).expanduser().resolve()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--log-dir: {error}") from error
        yield path
        return
    path = Path(tempfile.mkdtemp(prefix="pdmesh-"))
    keep = False
    try:
        yield path
    except PdmeshError:
        keep = any(path.iterdir())
        raise
    finally:
        if keep:
            print(f"pdmesh up: logs are kept in {path}", file=sys.stderr)
        else:
            shutil.rmtree(path, ignore_errors=True)
