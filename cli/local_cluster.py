"""The processes of one ``pdmesh up``: an embedded Valkey unless one is given, gateway, workers."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from cli.child_process import ChildProcess, ChildSpec
from cli.embedded_valkey import EmbeddedValkey
from cli.flags import REDIS_URL_VARIABLE, as_arguments, flag_error, gateway_config, worker_config
from cli.roles import PARENT_VARIABLE
from cli.supervisor import Supervisor
from mesh.config import ROLES, GatewayConfig, WorkerConfig
from mesh.errors import ConfigError
from mesh.model_text.model_files import resolve_model
from mesh.worker_info import Role

_ROOT = Path(__file__).resolve().parents[1]
_REDIS_CONNECT_TIMEOUT_S = 3.0
_STOP_TIMEOUT_S = 15.0
"""A gateway lets running requests finish for 5 s; the rest is for a machine that is busy."""

_WORKER_HOST = "127.0.0.1"
_ANY_URL = "redis://127.0.0.1:1"
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class LocalCluster:
    """Owns every process and their supervisor; ``stop()`` ends all of them."""

    def __init__(
        self, options: argparse.Namespace, run_dir: Path, show: Callable[[str], None]
    ) -> None:
        """Judge the flags; nothing is started yet.

        Args:
            options: parsed flags of ``up``.
            run_dir: an existing folder for the logs (the caller's).
            show: prints one line for people.

        Raises:
            ConfigError: a flag, the model or the port cannot be used.
        """
        self.supervisor = Supervisor(show)
        self._run_dir = run_dir
        self._redis_url: str = options.redis_url
        if self._redis_url:
            _check_redis(self._redis_url)
        options = argparse.Namespace(**{**vars(options), "redis_url": self._redis_url or _ANY_URL})
        gateway = gateway_config(options)
        port = _usable_port(gateway.host, gateway.port)
        self.gateway_config = msgspec.structs.replace(gateway, port=port)
        # On a shared registry, other hosts have a prefill-0 too.
        prefix = f"{_host_id()}-" if self._redis_url else ""
        # --host is where clients come in; what the workers bind is for this machine only.
        cores_file = str(run_dir / "cores")
        local = argparse.Namespace(
            # Workers stop after the gateway, which has given running requests their time.
            **{**vars(options), "host": _WORKER_HOST, "cores_file": cores_file, "drain_s": 0.0}
        )
        counts = {"prefill": options.prefill, "decode": options.decode}
        self.worker_configs = [
            worker_config(_of_role(local, role), role, f"{prefix}{role}-{i}")
            for role in ROLES
            for i in range(counts[role])
        ]
        self._share_gpus(show)
        try:
            resolve_model(gateway.model)
        except ConfigError as error:
            raise flag_error(error) from error
        self._valkey: EmbeddedValkey | None = None
        self._gateway: ChildProcess | None = None
        self.workers: list[ChildProcess] = []
        """In the order of ``worker_configs``, once started."""

    def _share_gpus(self, show: Callable[[str], None]) -> None:
        """Without --gpu-slots: as many workers on a GPU as it takes for all to have one."""
        first = self.worker_configs[0]
        if first.gpu_slots or first.device == "cpu":
            return
        from cli.gpu_sharing import gpu_slots  # late: looks for a driver

        try:
            slots = gpu_slots(self.worker_configs)
            configs = [msgspec.structs.replace(x, gpu_slots=slots) for x in self.worker_configs]
            configs[0].validate()
        except ConfigError as error:
            raise flag_error(error) from error
        self.worker_configs = configs
        if slots > 1:
            show(f"up to {slots} workers share a GPU and its memory")

    @property
    def url(self) -> str:
        """Where clients on this machine reach the gateway."""
        host = _WILDCARDS.get(self.gateway_config.host, self.gateway_config.host)
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.gateway_config.port}"

    def start(self) -> None:
        """Start everything; returns before it is ready.

        Raises:
            Unavailable: the embedded Valkey does not come up.
            OSError: a process cannot be started.
        """
        if not self._redis_url:
            self._valkey = EmbeddedValkey(self._run_dir)
            try:
                self._valkey.start()
            finally:
                self.supervisor.adopt(self._valkey.child)
            self._redis_url = self._valkey.url
        for config in self.worker_configs:
            name = config.worker_id[config.worker_id.rindex(config.role) :]
            child = self._child(name, config.role, config)
            self.workers.append(child)
            self.supervisor.start(child)
        self._gateway = self._child("gateway", "gateway", self.gateway_config)
        self.supervisor.start(self._gateway)

    def stop(self) -> None:
        """Stop in the order in which nobody misses anybody: gateway, workers, Valkey."""
        valkey = [self._valkey.child] if self._valkey is not None else []
        gateway = [self._gateway] if self._gateway is not None else []
        self.supervisor.stop([gateway, self.workers, valkey], _STOP_TIMEOUT_S)

    def _child(self, name: str, command: str, config: GatewayConfig | WorkerConfig) -> ChildProcess:
        path = os.environ.get("PYTHONPATH", "")
        spec = ChildSpec(
            name=name,
            argv=[sys.executable, "-P", "-m", "cli", command, *as_arguments(config)],
            env={
                REDIS_URL_VARIABLE: self._redis_url,
                PARENT_VARIABLE: str(os.getpid()),
                "PYTHONPATH": _join(str(_ROOT), path),
                "PYTHONUNBUFFERED": "1",
            },
        )
        return ChildProcess(spec, self._run_dir)


def _of_role(options: argparse.Namespace, role: Role) -> argparse.Namespace:
    """The flags of ``up`` as the workers of one role have them."""
    own = getattr(options, f"{role}_tp", 0)
    return argparse.Namespace(**{**vars(options), "tensor_parallel": own}) if own else options


def _join(root: str, path: str) -> str:
    parts: Sequence[str] = [part for part in path.split(os.pathsep) if part]
    return os.pathsep.join(parts if root in parts else [root, *parts])


def _host_id() -> str:
    host = "".join(c if c.isalnum() or c in ".-" else "-" for c in socket.gethostname())[:64]
    return f"{host.strip('.-') or 'host'}-{secrets.token_hex(3)}"


def _usable_port(host: str, port: int) -> int:
    """``port`` itself, or a free one for 0.

    Raises:
        ConfigError: it is in use, or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except socket.gaierror as error:
        raise ConfigError(f"--host: {host}: {error.strerror}") from error
    except OSError as error:
        raise ConfigError(f"--port: cannot bind {host}:{port}: {error.strerror}") from error


def _check_redis(redis_url: str) -> None:
    parts = urlsplit(redis_url)
    if parts.scheme == "unix" or not parts.hostname:
        return
    address = (parts.hostname, parts.port or 6379)
    try:
        socket.create_connection(address, timeout=_REDIS_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        text = f"--redis: cannot connect to {address[0]}:{address[1]}: {error}"
        raise ConfigError(text) from error
