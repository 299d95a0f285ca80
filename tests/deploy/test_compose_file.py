"""compose.yaml, image and command line fit together; whether it runs: test_containers.py."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import msgspec
import pytest
import yaml

from cli import flags
from cli.main import build_parser
from mesh.config import WorkerConfig
from mesh.gpus.lease import LEASE_TTL_S
from tests.deploy.metric_names import ROOT

_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")
_ROLES = ("gateway", "prefill", "decode", "prefill-gpu", "decode-gpu")


def _services() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load((ROOT / "compose.yaml").read_text())["services"])


def _with_defaults(text: str) -> str:
    return _VARIABLE.sub(lambda match: match[2], text)


def _worker(name: str) -> WorkerConfig:
    service = _services()[name]
    words = shlex.split(_with_defaults(service["command"]))
    url = service["environment"]["PDMESH_REDIS_URL"]
    options = build_parser().parse_args([*words, "--redis", url])
    return flags.worker_config(options, options.command)


@pytest.mark.parametrize("name", _ROLES)
def test_a_service_starts_its_role(name: str) -> None:
    service = _services()[name]
    if name == "gateway":
        words = shlex.split(_with_defaults(service["command"]))
        config = flags.gateway_config(
            build_parser().parse_args([*words, "--redis", "redis://redis"])
        )
        assert config.host == "0.0.0.0"
        assert service["ports"] == ["${PDMESH_BIND:-127.0.0.1}:${PDMESH_PORT:-8000}:8000"]
        return
    config = _worker(name)
    assert config.role == name.removesuffix("-gpu")
    assert f":{config.http_port}/" in service["environment"]["PDMESH_HEALTH_URL"]
    assert "ports" not in service
    assert "container_name" not in service  # it could not be scaled


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_on_gpus_scales_like_one_on_cpus(role: str) -> None:
    on_cpu, on_gpu = _worker(role), _worker(f"{role}-gpu")
    assert on_gpu == msgspec.structs.replace(on_cpu, worker_id=on_gpu.worker_id, device="cuda")
    service = _services()[f"{role}-gpu"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    # All of them: which one is whose, the workers settle by leases.
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", "all", ["gpu"])
    assert not {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"} & service["environment"].keys()
    assert service["networks"]["default"]["aliases"] == [role], "Prometheus asks for that name"
    # Longer than a dead worker's lease, or a replica would give up before it could take over.
    assert on_gpu.gpu_wait_s > 2 * LEASE_TTL_S
    cache = service["environment"]["TRITON_CACHE_DIR"]
    folders = [volume.split(":")[1] for volume in service["volumes"]]
    assert any(cache.startswith(f"{folder}/") for folder in folders), "nothing else can be written"


def test_workers_on_gpus_have_an_image_of_their_own() -> None:
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    arguments = set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))
    services = _services()
    for name in _ROLES:
        build = services[name]["build"]
        assert set(build["args"]) <= arguments
        assert (ROOT / build["dockerfile"]).is_file()
        on_gpu = name.endswith("-gpu")
        assert ("GPU" in build["args"]) == on_gpu
        assert _with_defaults(services[name]["image"]) == f"pdmesh:{'gpu' if on_gpu else 'local'}"
        assert _with_defaults(build["args"]["PIP_ARGS"]) == ""


@pytest.mark.parametrize("name", [role for role in _ROLES if role != "gateway"])
def test_compose_waits_until_a_worker_has_drained(name: str) -> None:
    grace_s = int(_services()[name]["stop_grace_period"].removesuffix("s"))
    assert grace_s >= _worker(name).drain_s + 5


def test_the_profile_in_the_environment_file_brings_one_worker_of_each_role() -> None:
    (line,) = [x for x in (ROOT / ".env").read_text().splitlines() if not x.startswith("#")]
    profile = line.removeprefix("COMPOSE_PROFILES=")
    services = _services()
    chosen = {n for n, s in services.items() if profile in s.get("profiles", [profile])}
    assert chosen == {"redis", "gateway", "prefill", "decode"}


def test_the_image_holds_every_package_that_the_roles_import() -> None:
    kept = {x[1:] for x in (ROOT / ".dockerignore").read_text().splitlines() if x.startswith("!")}
    with (ROOT / "pyproject.toml").open("rb") as file:
        packages = tomllib.load(file)["tool"]["importlinter"]["root_packages"]
    assert set(packages) <= kept
    assert {"requirements.lock", "deploy/healthcheck.py"} <= kept


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def _server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _healthcheck(url: str) -> int:
    script = str(ROOT / "deploy/healthcheck.py")
    return subprocess.run(
        [sys.executable, "-P", script], env={"PDMESH_HEALTH_URL": url}, check=False
    ).returncode


def test_the_health_check_tells_a_good_answer_from_a_bad_one_and_from_none() -> None:
    with _server() as url:
        assert _healthcheck(f"{url}/health") == 0
        assert _healthcheck(f"{url}/ready") == 1
    assert _healthcheck(f"{url}/health") == 1
