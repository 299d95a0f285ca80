"""Reading NVML: nvidia-ml-py itself over a made-up driver library, in a process that loads it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.unit.mesh.fake_nvml import FakeGpu, FakeLink, build_fake_nvml

_ROOT = Path(__file__).parents[3]
_GIB = 1 << 30
_FAR = ((0, 40, 50, 50), (40, 0, 50, 50), (50, 50, 0, 40), (50, 50, 40, 0))
_CODE = (
    "import dataclasses, json, logging; logging.basicConfig()\n"
    "from mesh.gpus.nvml import read_topology\n"
    "print(json.dumps(dataclasses.asdict(read_topology())))"
)


def _read(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _CODE], cwd=_ROOT, env=environment, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return {**json.loads(done.stdout), "log": done.stderr}


def _read_fake(
    folder: Path, gpus: Sequence[FakeGpu], levels: Sequence[Sequence[int]] = _FAR, init: int = 0
) -> dict[str, Any]:
    return _read(build_fake_nvml(folder, gpus, levels, init))


def test_switches_join_all(tmp_path: Path) -> None:
    gpus = [FakeGpu(used=i * _GIB, links=[FakeLink()] * 6) for i in range(3)]
    # The fourth: two of its links are down, and of the rest nothing is told.
    gpus.append(FakeGpu(links=[FakeLink(kind="UNKNOWN", remote=-1)] * 4 + [FakeLink(active=0)] * 2))
    found = _read_fake(tmp_path, gpus)
    assert found["gpus"] == [
        {"index": i, "uuid": f"GPU-{i}", "name": "NVIDIA H100 80GB HBM3",
         "memory_bytes": 80 * _GIB, "used_bytes": i * _GIB if i < 3 else 0}
        for i in range(4)
    ]  # fmt: skip
    assert found["link_gb_s"] == [[0 if i == j else 100 if 3 in (i, j) else 150 for j in range(4)]
                                  for i in range(4)]  # fmt: skip
    assert found["distance"] == [list(row) for row in _FAR]
    assert found["note"] == ""


def test_bridges_join_pairs(tmp_path: Path) -> None:
    card = FakeGpu(name="NVIDIA A100 80GB PCIe")
    gpus = [
        replace(card, links=[FakeLink(version=4, kind="GPU", remote=remote)] * 8)
        for remote in (2, 3, 0, 1)
    ]
    found = _read_fake(tmp_path, gpus)
    assert found["link_gb_s"] == [[0, 0, 200, 0], [0, 0, 0, 200], [200, 0, 0, 0], [0, 200, 0, 0]]


def test_a_card_of_another_container_is_no_switch(tmp_path: Path) -> None:
    lone = FakeGpu(links=[FakeLink(version=7, kind="GPU", remote=40)] * 2)
    found = _read_fake(tmp_path, [lone, lone], ((0, 30), (30, 0)))
    assert found["link_gb_s"] == [[0, 0], [0, 0]]


def test_what_a_card_or_driver_does_not_know_is_the_worst(tmp_path: Path) -> None:
    found = _read_fake(tmp_path, [FakeGpu(mig=-1), FakeGpu(mig=-1)], ((0, -1), (-1, 0)))
    assert len(found["gpus"]) == 2
    assert found["link_gb_s"] == [[0, 0], [0, 0]]
    assert found["distance"] == [[0, 50], [50, 0]]


def test_divided_and_lost_cards_are_left_out(tmp_path: Path) -> None:
    found = _read_fake(tmp_path, [FakeGpu(mig=1), FakeGpu(lost=1), FakeGpu(uuid="GPU-good")],
                       [row[:3] for row in _FAR[:3]])  # fmt: skip
    assert [gpu["uuid"] for gpu in found["gpus"]] == ["GPU-good"]
    assert found["gpus"][0]["index"] == 2
    assert (found["link_gb_s"], found["distance"]) == ([[0]], [[0]])
    assert "GPU 0 is divided (MIG)" in found["note"]
    assert "GPU 1: " in found["note"]
    assert found["log"].count("left out") == 2


def test_a_driver_that_does_not_start_is_no_gpu(tmp_path: Path) -> None:
    found = _read_fake(tmp_path, [FakeGpu()], ((0,),), init=9)
    assert found["gpus"] == []
    assert found["note"].startswith("NVML: ")


def test_no_driver_is_no_gpu() -> None:
    found = _read({"LD_LIBRARY_PATH": "", "PATH": ""})
    if found["gpus"]:  # this machine has some
        assert all(gpu["uuid"].startswith("GPU-") for gpu in found["gpus"])
        return
    assert found["note"].startswith("NVML: ")
