"""What ``up`` makes of its flags, before any process is started."""

from pathlib import Path

import pytest

from cli.embedded_valkey import EmbeddedValkey
from cli.flags import REDIS_URL_VARIABLE
from cli.local_cluster import LocalCluster
from cli.main import build_parser
from mesh.errors import ConfigError
from tests.unit.mesh.gpu_hosts import host


def cluster(tmp_path: Path, *arguments: str) -> LocalCluster:
    options = build_parser().parse_args(["up", "--port", "0", *arguments])
    return LocalCluster(options, tmp_path, print)


@pytest.fixture(autouse=True)
def _no_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REDIS_URL_VARIABLE, raising=False)


def test_workers_get_the_flags_and_ids_in_order(tmp_path: Path) -> None:
    made = cluster(tmp_path, "--prefill", "2", "--decode", "3", "--kv-blocks", "77")
    assert [config.worker_id for config in made.worker_configs] == [
        *("prefill-0", "prefill-1"),
        *("decode-0", "decode-1", "decode-2"),
    ]
    assert {config.kv_blocks for config in made.worker_configs} == {77}


@pytest.mark.parametrize(
    ("arguments", "prefill", "decode"),
    [
        ((), 1, 1),
        (("--tensor-parallel", "2"), 2, 2),
        (("--prefill-tp", "4"), 4, 1),
        (("--tensor-parallel", "2", "--decode-tp", "1"), 2, 1),
    ],
)
def test_each_role_has_its_number_of_ranks(
    arguments: tuple[str, ...], prefill: int, decode: int, tmp_path: Path
) -> None:
    ranks = [config.tensor_parallel for config in cluster(tmp_path, *arguments).worker_configs]
    assert ranks == [prefill, decode]


def test_an_open_gateway_does_not_open_the_workers(tmp_path: Path) -> None:
    made = cluster(tmp_path, "--host", "0.0.0.0")
    assert made.gateway_config.host == "0.0.0.0"
    assert {config.host for config in made.worker_configs} == {"127.0.0.1"}
    assert made.url == f"http://127.0.0.1:{made.gateway_config.port}"


def test_port_0_becomes_a_real_port(tmp_path: Path) -> None:
    assert cluster(tmp_path).gateway_config.port > 0


def test_ids_are_unique_on_a_shared_registry(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path)
    server.start()
    try:
        first, second = (cluster(tmp_path, "--redis", server.url) for _ in range(2))
    finally:
        server.stop()
    ids = [config.worker_id for made in (first, second) for config in made.worker_configs]
    assert len(set(ids)) == 4
    assert all(worker_id.endswith(("-prefill-0", "-decode-0")) for worker_id in ids)


@pytest.mark.parametrize(
    ("num_gpus", "arguments", "slots", "said"),
    [
        (1, [], 2, ["up to 2 workers share a GPU and its memory"]),
        (2, [], 1, []),
        (2, ["--prefill", "2", "--decode", "3"], 3, ["up to 3 workers share a GPU and its memory"]),
        (4, ["--prefill-tp", "2", "--decode", "2"], 1, []),
        (
            3,
            ["--prefill-tp", "2", "--decode", "2"],
            2,
            ["up to 2 workers share a GPU and its memory"],
        ),
        (1, ["--gpu-slots", "4"], 4, []),
        (1, ["--device", "cpu"], 0, []),
        (0, [], 0, []),
    ],
)
def test_as_many_workers_share_a_gpu_as_have_to(
    num_gpus: int, arguments: list[str], slots: int, said: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("cli.gpu_sharing.read_topology", lambda: host(num_gpus))
    monkeypatch.setattr("engine.device.missing_for_cuda", lambda: "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    shown: list[str] = []
    options = build_parser().parse_args(["up", "--port", "0", *arguments])
    made = LocalCluster(options, tmp_path, shown.append)
    assert {config.gpu_slots for config in made.worker_configs} == {slots}
    assert shown == said


def test_a_gpu_that_is_not_there_or_too_few_are_told_by_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.device.missing_for_cuda", lambda: "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("cli.gpu_sharing.read_topology", lambda: host(0))
    with pytest.raises(ConfigError, match=r"^--device: cuda, but there is no GPU$"):
        cluster(tmp_path, "--device", "cuda")
    monkeypatch.setattr("cli.gpu_sharing.read_topology", lambda: host(1))
    with pytest.raises(ConfigError, match=r"^--device: 2 GPUs a worker, and there are 1 x NVIDIA"):
        cluster(tmp_path, "--decode-tp", "2")
    with pytest.raises(ConfigError, match=r"^--gpu-slots: 9 is not between 0 and 8$"):
        cluster(tmp_path, "--decode", "8")
