"""The manifests: valid by the API's own schemas, and consistent with each other and the flags."""

from __future__ import annotations

import copy
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml

from cli import flags
from cli.main import build_parser
from mesh.config import WorkerConfig
from tests.deploy.metric_names import ROOT, in_query, in_source

_FOLDER = ROOT / "deploy/kubernetes"
_GPU_FOLDER = ROOT / "deploy/kubernetes-gpu"
_VERSIONS = ("1.30", "1.37")
"""From the oldest that is claimed to the newest that the schemas know."""
_WORKERS = ("prefill", "decode")


def _kustomization() -> dict[str, Any]:
    return dict(yaml.safe_load((_FOLDER / "kustomization.yaml").read_text()))


def _objects() -> list[dict[str, Any]]:
    return [
        document
        for name in _kustomization()["resources"]
        for document in yaml.safe_load_all((_FOLDER / name).read_text())
    ]


def _find(kind: str, name: str) -> dict[str, Any]:
    (found,) = [x for x in _objects() if x["kind"] == kind and x["metadata"]["name"] == name]
    return found


def _of_kind(kind: str) -> list[dict[str, Any]]:
    return [x for x in _objects() if x["kind"] == kind]


def _merged(base: Any, patch: Any) -> Any:
    """A strategic merge as kustomize does it here: lists of named things by name, others whole."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{key: _merged(base.get(key), value) for key, value in patch.items()}}
    named = [isinstance(x, list) and all(isinstance(y, dict) and "name" in y for y in x)
             for x in (base, patch)]  # fmt: skip
    if all(named):
        patched = {item["name"]: item for item in patch}
        kept = [_merged(item, patched.pop(item["name"], item)) for item in base]
        return [*kept, *patched.values()]
    return copy.deepcopy(patch)


def _on_gpu(role: str) -> dict[str, Any]:
    patch = yaml.safe_load((_GPU_FOLDER / f"{role}.yaml").read_text())
    assert patch["metadata"] == {"name": role, "namespace": _kustomization()["namespace"]}
    return dict(_merged(_find("Deployment", role), patch))


def _pod(deployment: dict[str, Any]) -> dict[str, Any]:
    return dict(deployment["spec"]["template"]["spec"])


def _container(deployment: dict[str, Any]) -> dict[str, Any]:
    (container,) = _pod(deployment)["containers"]
    return dict(container)


def _worker_config(role: str, deployment: dict[str, Any] | None = None) -> WorkerConfig:
    container = _container(deployment or _find("Deployment", role))
    (url,) = [x["value"] for x in container["env"] if x["name"] == "PDMESH_REDIS_URL"]
    options = build_parser().parse_args([*container["args"], "--redis", url])
    return flags.worker_config(options, options.command)


@pytest.mark.parametrize("version", _VERSIONS)
def test_every_object_is_valid_by_the_schemas_of_the_api(version: str) -> None:
    for found in _objects():
        kubernetes_validate.validate(found, version, strict=True)


def test_the_validator_refuses_what_the_api_would() -> None:
    good = _find("Deployment", "decode")
    for path, value in (
        (("spec", "template", "spec", "terminationGracePeriodSecond"), 5),
        (("spec", "replicas"), "two"),
    ):
        bad = copy.deepcopy(good)
        place = bad
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(bad, _VERSIONS[-1], strict=True)


def test_every_manifest_is_applied() -> None:
    others = {"kustomization.yaml", "prometheus-adapter-values.yaml"}
    files = {path.name for path in _FOLDER.glob("*.yaml")} - others
    assert files == set(_kustomization()["resources"])


@pytest.mark.parametrize("role", _WORKERS)
def test_a_pod_has_time_to_drain(role: str) -> None:
    config = _worker_config(role)
    assert config.role == role
    assert config.drain_s > 0
    grace_s = _pod(_find("Deployment", role))["terminationGracePeriodSeconds"]
    assert grace_s >= config.drain_s + 10


def test_the_gateway_leaves_its_service_before_it_stops() -> None:
    deployment = _find("Deployment", "gateway")
    command = _container(deployment)["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    assert _pod(deployment)["terminationGracePeriodSeconds"] >= float(command[1]) + 5 + 10
    flags.gateway_config(
        build_parser().parse_args([*_container(deployment)["args"], "--redis", "redis://redis"])
    )


def test_selectors_find_their_pods() -> None:
    labels = {x["metadata"]["name"]: x["spec"]["template"]["metadata"]["labels"]
              for x in _of_kind("Deployment")}  # fmt: skip
    assert labels.keys() == {"redis", "gateway", *_WORKERS}
    for name in labels:
        assert _find("Deployment", name)["spec"]["selector"]["matchLabels"] == labels[name]
    for kind in ("PodDisruptionBudget", "Service"):
        for found in _of_kind(kind):
            selector = found["spec"]["selector"]
            assert selector.get("matchLabels", selector) == labels[found["metadata"]["name"]]
    assert {x["metadata"]["name"] for x in _of_kind("PodDisruptionBudget")} == {
        "gateway",
        *_WORKERS,
    }


def test_probes_and_services_use_ports_that_are_there() -> None:
    for deployment in _of_kind("Deployment"):
        container = _container(deployment)
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container.get(probe, {}).get("httpGet")
            assert asked is None or asked["port"] in ports
        assert "readinessProbe" in container
        assert "livenessProbe" in container
    for role in _WORKERS:
        config = _worker_config(role)
        ports = {p["name"]: p["containerPort"]
                 for p in _container(_find("Deployment", role))["ports"]}  # fmt: skip
        assert ports == {"control": config.control_port, "http": config.http_port}
    for service in _of_kind("Service"):
        deployment = _find("Deployment", service["metadata"]["name"])
        ports = {port["name"] for port in _container(deployment)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_no_container_has_rights_that_it_does_not_need() -> None:
    for deployment in _of_kind("Deployment"):
        assert _pod(deployment)["securityContext"]["runAsNonRoot"]
        context = _container(deployment)["securityContext"]
        assert not context["allowPrivilegeEscalation"]
        assert context["readOnlyRootFilesystem"]
        assert context["capabilities"] == {"drop": ["ALL"]}


def test_the_autoscalers_ask_for_metrics_that_the_workers_export() -> None:
    values = yaml.safe_load((_FOLDER / "prometheus-adapter-values.yaml").read_text())
    offered = {rule["name"]["as"]: in_query(rule["seriesQuery"])
               for rule in values["rules"]["custom"]}  # fmt: skip
    scalers = _of_kind("HorizontalPodAutoscaler")
    assert {x["spec"]["scaleTargetRef"]["name"] for x in scalers} == set(_WORKERS)
    for scaler in scalers:
        assert "replicas" not in _find("Deployment", scaler["metadata"]["name"])["spec"]
        for metric in scaler["spec"]["metrics"]:
            series = offered[metric["pods"]["metric"]["name"]]
            assert series
            assert series <= in_source()


@pytest.mark.parametrize("role", _WORKERS)
def test_a_worker_on_gpus_is_the_same_but_for_its_device(role: str) -> None:
    on_cpu, on_gpu = _find("Deployment", role), _on_gpu(role)
    for version in _VERSIONS:
        kubernetes_validate.validate(on_gpu, version, strict=True)
    config = _worker_config(role, on_gpu)
    assert config == msgspec.structs.replace(
        _worker_config(role),
        worker_id=config.worker_id,
        device="cuda",
        kv_memory_mib=WorkerConfig(role="decode", worker_id="", redis_url="").kv_memory_mib,
    )
    container = _container(on_gpu)
    resources = container["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == config.num_gpus
    assert resources["limits"] == resources["requests"]
    cache = next(x["value"] for x in container["env"] if x["name"] == "TRITON_CACHE_DIR")
    mounts = {x["mountPath"] for x in container["volumeMounts"]}
    assert any(cache.startswith(f"{mount}/") for mount in mounts), "nothing else can be written"
    # A pod of a new version must not wait for a GPU that the old one has.
    assert on_gpu["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}
    same = ("securityContext", "volumes", "terminationGracePeriodSeconds")
    assert all(_pod(on_gpu)[key] == _pod(on_cpu)[key] for key in same)
    assert container["securityContext"] == _container(on_cpu)["securityContext"]


def test_the_cluster_on_gpus_is_made_of_the_one_on_cpus() -> None:
    found = yaml.safe_load((_GPU_FOLDER / "kustomization.yaml").read_text())
    assert [(_GPU_FOLDER / base).resolve() for base in found["resources"]] == [_FOLDER]
    files = {path.name for path in _GPU_FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert {patch["path"] for patch in found["patches"]} == files
    images = {image["name"] for image in found["images"]}
    assert {_container(_on_gpu(role))["image"] for role in _WORKERS} == images
