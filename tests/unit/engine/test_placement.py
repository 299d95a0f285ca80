"""Which device a worker gets, and the lease around its life, in real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from cli.embedded_valkey import EmbeddedValkey
from engine.device import Placement, choose_device, missing_for_cuda
from mesh.config import WorkerConfig
from mesh.errors import ConfigError
from mesh.gpus.lease_table import GpuLeaseTable, Holder, host_id
from mesh.gpus.topology import NO_GPUS
from mesh.registry.redis_client import open_blocking_redis
from mesh.telemetry import metrics
from tests.unit.mesh.fake_nvml import FakeGpu, FakeLink, build_fake_nvml
from tests.unit.mesh.gpu_hosts import bridged_a100, unlinked
from worker.placement import show_gpus
from worker.start import build_engine

_ROOT = Path(__file__).parents[3]


def test_auto_takes_a_gpu_where_everything_for_it_is_there() -> None:
    assert choose_device("auto", unlinked(), lambda: "") == "cuda"
    assert choose_device("cuda", unlinked(), lambda: "") == "cuda"
    assert choose_device("cpu", unlinked(), lambda: "") == "cpu"
    assert choose_device("auto", NO_GPUS, lambda: "") == "cpu"


def test_auto_computes_on_the_cpu_beside_a_gpu_it_cannot_use_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert choose_device("auto", unlinked(), lambda: "torch is built without CUDA") == "cpu"
    assert "beside 4 x NVIDIA L40S 48 GiB, no NVLink: torch is built without CUDA" in caplog.text


def test_cuda_without_what_it_needs_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^device: cuda, but there is no GPU$"):
        choose_device("cuda", NO_GPUS, lambda: "")
    with pytest.raises(ConfigError, match=r"^device: cuda, but torch is built without CUDA$"):
        choose_device("cuda", unlinked(), lambda: "torch is built without CUDA")


def test_the_installed_torch_is_judged_without_loading_it() -> None:
    code = (
        "import sys; from engine.device import missing_for_cuda\n"
        "print(missing_for_cuda()); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True, check=True
    )
    missing, loaded = done.stdout.splitlines()
    assert loaded == "False"
    assert missing == missing_for_cuda()
    assert (torch.version.cuda is None) == ("is built without CUDA" in missing)


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path)
    server.start()
    yield server
    server.stop()


Start = Callable[..., "Placed"]


class Placed:
    """One process of ``placed_process``."""

    def __init__(self, config: WorkerConfig, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "tests.unit.engine.placed_process",
                   msgspec.json.encode(config).decode()]  # fmt: skip
        self.process = subprocess.Popen(
            command, cwd=_ROOT, env=dict(environment), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def line(self) -> dict[str, Any]:
        """What it says next."""
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def wait_for(self, words: str) -> None:
        """Until it logs these."""
        assert self.process.stderr is not None
        assert any(words in line for line in self.process.stderr), "it has ended"

    def uuids(self) -> list[str]:
        """What it was given."""
        said = self.line()
        assert said["device"] == "cuda"
        assert not said["torch"], "CUDA_VISIBLE_DEVICES must be there first"
        assert said["visible"] == ",".join(gpu["uuid"] for gpu in said["gpus"])
        return [gpu["uuid"] for gpu in said["gpus"]]

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal; its exit code."""
        self.process.send_signal(number)
        return self.process.wait(20)

    def close(self) -> None:
        """Forget its output."""
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@pytest.fixture
def start(valkey: EmbeddedValkey, tmp_path: Path) -> Iterator[Start]:
    gpus = [FakeGpu(links=[FakeLink()] * 2)] * 2
    environment = build_fake_nvml(tmp_path, gpus, ((0, 40), (40, 0)))
    running: list[Placed] = []

    def start_one(worker_id: str, extra: Mapping[str, str] | None = None, **fields: Any) -> Placed:
        config = WorkerConfig(role="decode", worker_id=worker_id, redis_url=valkey.url, **fields)
        running.append(Placed(config, {**environment, **(extra or {})}))
        return running[-1]

    yield start_one
    for placed in running:
        if placed.process.poll() is None:
            placed.process.kill()
        placed.process.wait()
        placed.close()


def test_workers_share_a_host_out_among_themselves(start: Start) -> None:
    first, second = start("d0"), start("d1")
    taken = first.uuids() + second.uuids()
    assert sorted(taken) == ["GPU-0", "GPU-1"]
    # The third has none until somebody leaves.
    third = start("d2", gpu_wait_s=30.0)
    third.wait_for("waiting for a GPU: 1 wanted of 2, leased are GPU-0")
    assert first.end() == 0
    assert third.uuids() == taken[:1]
    refused = start("d3", gpu_wait_s=0.0)
    said = refused.line()
    assert said["code"] == "unavailable"
    assert "GPU-0 (NVIDIA H100 80GB HBM3) by" in said["message"]
    assert refused.process.wait(20) == 3
    # A worker that waits can be told to stop.
    waiting = start("d4", gpu_wait_s=600.0)
    waiting.wait_for("waiting for a GPU: ")
    assert waiting.end() == 0


def test_a_worker_of_two_ranks_gets_a_linked_pair(valkey: EmbeddedValkey, tmp_path: Path) -> None:
    gpus = [
        FakeGpu("NVIDIA A100 80GB PCIe", links=[FakeLink(version=4, kind="GPU", remote=remote)] * 8)
        for remote in (2, 3, 0, 1)
    ]
    near = ((0, 40, 50, 50), (40, 0, 50, 50), (50, 50, 0, 40), (50, 50, 40, 0))
    environment = build_fake_nvml(tmp_path, gpus, near)
    given = []
    for worker_id in ("d0", "d1"):
        config = WorkerConfig(
            role="decode", worker_id=worker_id, redis_url=valkey.url, tensor_parallel=2
        )
        worker = Placed(config, environment)
        try:
            worker.wait_for("NVLink 200 GB/s between all pairs: GPU-")
            said = worker.line()
            given.append(said["visible"])
            assert [gpu["link_gb_s"] for gpu in said["gpus"]] == [[0, 200], [200, 0]]
        finally:
            # As a crash does, without giving the lease back.
            worker.end(signal.SIGKILL)
            worker.close()
    assert given == ["GPU-0,GPU-2", "GPU-1,GPU-3"]


def test_a_gpu_that_strangers_use_is_the_last_and_told_of(
    valkey: EmbeddedValkey, tmp_path: Path
) -> None:
    gpus = [FakeGpu(used=30 << 30), FakeGpu()]
    environment = build_fake_nvml(tmp_path, gpus, ((0, 40), (40, 0)))
    for num_gpus, given in ((1, ["GPU-1"]), (2, ["GPU-0", "GPU-1"])):
        config = WorkerConfig(
            role="decode", worker_id="d", redis_url=valkey.url, tensor_parallel=num_gpus
        )
        worker = Placed(config, environment)
        try:
            if num_gpus == 2:
                worker.wait_for("GPU-0 has 30.0 GiB in use by others without a lease")
            assert worker.uuids() == given
            assert worker.end() == 0
        finally:
            worker.process.kill()
            worker.process.wait()
            worker.close()


def test_a_worker_whose_lease_is_taken_stops_and_says_so(
    start: Start, valkey: EmbeddedValkey
) -> None:
    worker = start("d0")
    (uuid,) = worker.uuids()
    redis = open_blocking_redis(valkey.url)
    redis.flushall()
    table = GpuLeaseTable(redis, host_id(), Holder("intruder", 1, 1), 60_000)
    assert table.take([uuid]) is None
    assert worker.line() == {
        "code": "unavailable",
        "message": "left the GPU to intruder, which leases it now",
    }
    assert worker.process.wait(20) == 3
    assert table.holders([uuid])[uuid] == []
    redis.close()


def test_a_worker_takes_no_more_than_it_is_shown(start: Start) -> None:
    assert start("d0", {"CUDA_VISIBLE_DEVICES": "1"}).uuids() == ["GPU-1"]
    none = start("d1", {"CUDA_VISIBLE_DEVICES": ""}, device="cuda")
    assert none.line()["message"] == (
        "device: cuda, but there is no GPU (CUDA_VISIBLE_DEVICES leaves 0 of 2)"
    )
    cpu = start("d2", {"CUDA_VISIBLE_DEVICES": ""}).line()
    assert (cpu["device"], cpu["gpus"], cpu["visible"]) == ("cpu", [], "")
    assert start("d3", device="cpu").line()["visible"] is None


def test_the_worker_commands_refuse_cuda_by_name(valkey: EmbeddedValkey, tmp_path: Path) -> None:
    environment = build_fake_nvml(tmp_path, [FakeGpu()], ((0,),))
    if not missing_for_cuda():
        pytest.skip("this torch can use a GPU")
    command = [sys.executable, "-m", "cli", "decode", "--redis", valkey.url, "--device", "cuda"]
    done = subprocess.run(
        command, cwd=_ROOT, env=dict(environment), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "pdmesh decode: error: --device: cuda, but torch " in done.stderr
    assert done.stderr.rstrip().endswith("is built without CUDA")


def test_the_gpus_of_a_worker_are_in_its_metrics() -> None:
    topology = bridged_a100()
    placed = Placement("cuda", topology.subset([topology.gpus[i].uuid for i in (0, 2)]))
    show_gpus(placed.worker_gpus())
    assert (
        'pdmesh:gpu_info{link_gb_s="300,0",memory_mib="81920",name="NVIDIA A100 80GB PCIe",'
        'uuid="GPU-00000002-0000-0000-0000-000000000000"} 1.0'
    ) in metrics.render().decode()


def test_a_driver_that_torch_cannot_use_is_refused_by_name() -> None:
    if torch.cuda.is_available():
        pytest.skip("CUDA works here")
    config = WorkerConfig(role="decode", worker_id="d", redis_url="redis://h", device="cuda")
    with pytest.raises(ConfigError, match=r"^device: torch \S+ cannot use CUDA: "):
        build_engine(config, Placement("cuda", unlinked()))
