"""A Docker Engine of the tests' own: its own socket, data and process, and no firewall rules."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from pathlib import Path

CACHE_VARIABLE = "PDMESH_DEPLOY_CACHE"
"""Folder that keeps images from run to run (about 6 GiB); it is used by one run at a time."""

_DEFAULT_CACHE = "/var/tmp/pdmesh-deploy"
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 20.0


class NoEngine(Exception):
    """No engine can run here; the text says why."""


class DockerEngine:
    """Runs ``dockerd`` until ``close()``; ``docker`` and ``compose`` talk to it alone."""

    def __init__(self) -> None:
        """Start the engine and wait until it answers.

        Raises:
            NoEngine: a program, a right or the kernel's help is missing.
        """
        if os.getuid() != 0:
            raise NoEngine("dockerd must be started as root")
        for program in ("dockerd", "docker-compose", "debootstrap"):
            if shutil.which(program) is None:
                raise NoEngine(f"{program} is not installed")
        self.cache = Path(os.environ.get(CACHE_VARIABLE, _DEFAULT_CACHE))
        self.cache.mkdir(parents=True, exist_ok=True)
        self._lock = (self.cache / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise NoEngine(f"another run uses {self.cache}") from error
        # Unix sockets have short names: not below a test's temporary folder.
        self._run = self.cache / "run"
        shutil.rmtree(self._run, ignore_errors=True)
        self._run.mkdir()
        socket = f"unix://{self._run}/docker.sock"
        self.environment = {**os.environ, "DOCKER_HOST": socket, "DOCKER_BUILDKIT": "1"}
        # Debian's client builds with BuildKit by itself, others need a plug-in for it.
        debian = Path("/usr/bin/docker")
        self._docker = str(debian) if debian.exists() else "docker"
        self._log = self._run / "dockerd.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "dockerd",
                    *("--host", socket, "--pidfile", str(self._run / "pid")),
                    *("--data-root", str(self.cache / "data"), "--exec-root", str(self._run)),
                    # Containers reach each other over their bridge and the host over a proxy
                    # process; nothing is added to the machine's firewall or network.
                    *("--bridge=none", "--iptables=false", "--ip6tables=false"),
                    "--ip-masq=false",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                # A Ctrl-C is for the tests, which then stop the engine in order.
                process_group=0,
            )
        self._wait_until_answering()

    def docker(self, *arguments: str, timeout_s: float = 60.0) -> str:
        """Run the client; its standard output."""
        return self._run_client([self._docker, *arguments], {}, timeout_s)

    def compose(
        self, *arguments: str, settings: dict[str, str], cwd: Path, timeout_s: float
    ) -> str:
        """Run docker-compose with ``settings`` added to the environment; its standard output."""
        return self._run_client(["docker-compose", *arguments], settings, timeout_s, cwd)

    def close(self) -> None:
        """Stop the engine, and with it whatever container still runs."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._lock.close()

    def _run_client(
        self, argv: list[str], settings: dict[str, str], timeout_s: float, cwd: Path | None = None
    ) -> str:
        done = subprocess.run(
            argv,
            env={**self.environment, **settings},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(argv)}:\n{done.stdout}\n{done.stderr[-6000:]}"
        return done.stdout

    def _wait_until_answering(self) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            asked = subprocess.run(
                [self._docker, "info"], env=self.environment, capture_output=True, check=False
            )
            if asked.returncode == 0:
                return
            time.sleep(0.2)
        self.close()
        raise NoEngine(f"dockerd does not run here: {self._log.read_text()[-500:].strip()}")
