"""A cluster whose roles are started one by one, each in a node of a network."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from cli.embedded_valkey import valkey_binary
from cli.flags import REDIS_URL_VARIABLE
from cli.roles import PARENT_VARIABLE
from mesh import parent_watch
from tests.integration.network import Network
from tests.integration.up_process import wait_until

ROOT = Path(__file__).parents[2]
WORKERS = {"prefill": "prefill", "decode": "decode"}
"""Roles by worker id, which is its node's name too."""

_PASSWORD = "only-in-these-namespaces"
_REDIS_PORT = 6379
_HTTP_PORT = 8000
_START_TIMEOUT_S = 300.0
_VALKEY_CONFIG = f"""\
bind 0.0.0.0
port {_REDIS_PORT}
requirepass {_PASSWORD}
save ""
appendonly no
"""


def nodes(workers: Mapping[str, str] = WORKERS) -> tuple[str, ...]:
    """The nodes that a cluster of these workers needs."""
    return ("registry", *workers, "gateway")


class SeparateRoles:
    """One process in each node; ``close()`` kills them. Ports stay the same over restarts."""

    def __init__(
        self,
        folder: Path,
        network: Network,
        *worker_flags: str,
        transport: str,
        workers: Mapping[str, str] = WORKERS,
    ) -> None:
        """Start everything; the network has the nodes that ``nodes(workers)`` gives."""
        self._folder = folder
        self._network = network
        self._url = f"http://{network.addresses['gateway']}:{_HTTP_PORT}"
        worker = (
            *("--host", "0.0.0.0", "--control-port", "7001", "--http-port", "7002"),
            *("--device", "cpu", "--transport", transport),
            *("--cores-file", str(folder / "cores")),
            *worker_flags,
        )
        self._arguments = {
            name: (
                role,
                *("--worker-id", name, "--advertise-host", network.addresses[name]),
                *worker,
            )
            for name, role in workers.items()
        }
        self._arguments["gateway"] = (
            "gateway",
            *("--host", "0.0.0.0", "--port", str(_HTTP_PORT), "--request-timeout-s", "60"),
        )
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._start_valkey()
        for name in self._arguments:
            self.start(name)

    def start(self, name: str) -> None:
        """Start a worker or ``gateway``, for the first time or again."""
        argv = [sys.executable, "-P", "-m", "cli", *self._arguments[name]]
        self._spawn(name, argv, subprocess.DEVNULL)

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """Stop, continue or kill one process; a killed one is reaped."""
        self._processes[name].send_signal(number)
        if number is signal.SIGKILL:
            self._processes[name].wait()

    def runs(self, name: str) -> bool:
        """Whether a process was started and has not ended."""
        return self._processes[name].poll() is None

    def read_url(self) -> str:
        """Wait until it is ready; where it listens. The caller's thread must be in a node."""
        wait_until(self._is_ready, _START_TIMEOUT_S)
        return self._url

    def logs(self) -> str:
        """The last lines of every process."""
        ends = {path.stem: path.read_text()[-4000:] for path in self._folder.glob("*.log")}
        return "\n".join(f"== {name}\n{end}" for name, end in ends.items())

    def close(self) -> None:
        """Kill every process, also a stopped one."""
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _is_ready(self) -> bool:
        for name, process in self._processes.items():
            assert process.poll() is None, f"{name} ended:\n{self.logs()}"
        try:
            with urllib.request.urlopen(f"{self._url}/ready", timeout=10) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def _start_valkey(self) -> None:
        wrapper = [sys.executable, "-I", "-S", parent_watch.__file__, str(os.getpid())]
        argv = [*wrapper, str(valkey_binary()), "-"]
        process = self._spawn("registry", argv, subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(_VALKEY_CONFIG.encode())
        process.stdin.close()

    def _spawn(self, name: str, argv: list[str], stdin: int) -> subprocess.Popen[bytes]:
        registry = self._network.addresses["registry"]
        environment = {
            REDIS_URL_VARIABLE: f"redis://:{_PASSWORD}@{registry}:{_REDIS_PORT}/0",
            PARENT_VARIABLE: str(os.getpid()),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            # All nodes share one kernel: without this UCX finds shared memory, and no network.
            "UCX_TLS": "tcp",
            "UCX_NET_DEVICES": "eth0",
        }
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                self._network.inside(name, argv),
                stdin=stdin,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env={**os.environ, **environment},
            )
        self._processes[name] = process
        return process
