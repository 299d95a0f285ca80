"""The cluster of compose.yaml as the tests drive it."""

from __future__ import annotations

import http.client
import json
import socket
import time
from pathlib import Path
from typing import Any

from tests.deploy.docker_engine import DockerEngine
from tests.integration.up_process import wait_until

PROJECT = "pdmesh-tests"
ROOT = Path(__file__).parents[2]

_COMMAND_TIMEOUT_S = 180.0
_START_TIMEOUT_S = 240.0
"""The first workers of an image compile the kernels."""


class Composed:
    """Owns the project's containers; satisfies what ``RunningCluster`` asks of its ``up``."""

    def __init__(self, engine: DockerEngine, images: dict[str, str]) -> None:
        self._engine = engine
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._settings = {
            **images,
            "PDMESH_PORT": str(self._port),
            "PDMESH_KV_MEMORY_MIB": "128",
            # Enough for a busy machine to end what the tests start.
            "PDMESH_DECODE_ARGS": "--drain-s=90",
            "COMPOSE_PROFILES": "cpu",
        }

    def up(self, **scale: int) -> None:
        """Bring the services to these numbers of containers; returns before they are ready."""
        scales = [word for role, n in scale.items() for word in ("--scale", f"{role}={n}")]
        self.compose("up", "--detach", "--no-build", "--timeout", "120", *scales)

    def down(self) -> None:
        """Remove containers, network and volumes."""
        self.compose("down", "--volumes", "--timeout", "5")

    def close(self) -> None:
        """The same, at the end of the tests."""
        self.down()

    def compose(self, *arguments: str) -> str:
        """Any command of docker-compose on this project."""
        return self._engine.compose(
            *("--project-name", PROJECT, "--no-ansi", *arguments),
            settings=self._settings,
            cwd=ROOT,
            timeout_s=_COMMAND_TIMEOUT_S,
        )

    def read_url(self) -> str:
        """Wait until the gateway is ready; where it listens."""
        start_s = time.monotonic()
        while not self._is_ready():
            if time.monotonic() - start_s > _START_TIMEOUT_S:
                raise AssertionError(f"not ready:\n{self.compose('logs', '--tail', '30')}")
            time.sleep(0.3)
        return f"http://127.0.0.1:{self._port}"

    def containers(self, role: str) -> list[dict[str, Any]]:
        """What the engine says about the containers of a service, running or not."""
        ids = self._ids("container", f"label=com.docker.compose.service={role}", "--all")
        return [self._inspect(container_id) for container_id in ids]

    def container_of(self, worker_id: str) -> str:
        """The container that a worker runs in: its name is in the worker's id."""
        return worker_id.split("-")[1]

    def wait_healthy(self, timeout_s: float) -> None:
        """Wait until the image's own health checks say so of every container."""
        roles = ("redis", "gateway", "prefill", "decode")
        wait_until(
            lambda: all(
                container["State"].get("Health", {}).get("Status") == "healthy"
                for role in roles
                for container in self.containers(role)
            ),
            timeout_s,
        )

    def kill(self, container: str) -> None:
        """End a container as a crash of its host would."""
        self._engine.docker("kill", container)

    def left(self) -> dict[str, list[str]]:
        """What there still is of this project, by kind."""
        kinds = {"container": ("--all",), "network": (), "volume": ()}
        return {kind: self._ids(kind, "", *more) for kind, more in kinds.items()}

    def _ids(self, kind: str, also: str, *more: str) -> list[str]:
        filters = [f"label=com.docker.compose.project={PROJECT}", *([also] if also else [])]
        words = [word for each in filters for word in ("--filter", each)]
        return self._engine.docker(kind, "ls", "--quiet", *more, *words).split()

    def _inspect(self, container_id: str) -> dict[str, Any]:
        (found,) = json.loads(self._engine.docker("inspect", container_id))
        return dict(found)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=2)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
