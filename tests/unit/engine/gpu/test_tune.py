"""Measuring launch configurations: the fastest is kept, in a table that launches read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources

from engine.backends.gpu import tune, tuning
from engine.backends.gpu.kernels.linear import int4_matmul, int8_matmul
from engine.backends.gpu.tuning import LaunchConfig
from engine.backends.gpu.tuning_case import TuningCase


def config(block: int) -> LaunchConfig:
    return LaunchConfig(meta={"BLOCK": block}, num_warps=4, num_stages=2)


def launch_that_takes(config: LaunchConfig) -> float:
    """Its time is its distance from 32; from 128 on it does not fit."""
    if config.meta["BLOCK"] >= 128:
        raise OutOfResources(300, 227, "shared memory")
    return abs(config.meta["BLOCK"] - 32)


def run_once(launch: Callable[[], object]) -> float:
    """A clock that believes the launch."""
    time = launch()
    assert isinstance(time, int)
    return float(time)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tuning, "_FOLDER", tmp_path)
    tuning._table.cache_clear()
    tuning.config_of_card.cache_clear()
    yield tmp_path
    tuning._table.cache_clear()
    tuning.config_of_card.cache_clear()


def test_the_fastest_that_fits_is_written_and_read(
    tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    candidates = [config(block) for block in (16, 30, 64, 128)]
    cases = [
        TuningCase(
            kernel="matmul",
            whens=({"m": (1, 8)}, {"m": (100, 200)}),
            candidates=candidates,
            launch=launch_that_takes,
        ),
        TuningCase(
            kernel="matmul", whens=({},), candidates=candidates[2:], launch=launch_that_takes
        ),
        TuningCase(
            kernel="other", whens=({},), candidates=candidates[3:], launch=launch_that_takes
        ),
    ]
    path = tuning.table_path("nvidia_x1")
    path.write_text(json.dumps({"kept": [{"meta": {}, "num_warps": 1, "num_stages": 1}]}))
    tune.write_table(path, tune.tune(cases, run_once))
    for m, block in ((1, 30), (150, 30), (50, 64)):
        assert tuning.config_of_card("nvidia_x1", "matmul", m=m) == config(block)
    assert tuning.config_of_card("nvidia_x1", "kept").num_warps == 1
    printed = capsys.readouterr().out
    assert "out of resource: shared memory" in printed
    assert "other {}: no candidate can be launched" in printed


def test_a_new_table_is_made(tables: Path) -> None:
    entry = {"when": {}, "meta": {"BLOCK": 1}, "num_warps": 4, "num_stages": 2}
    tune.write_table(tuning.table_path("nvidia_x2"), {"matmul": [entry]})
    assert tuning.config_of_card("nvidia_x2", "matmul", m=3) == config(1)


@pytest.mark.parametrize("kernel", [int4_matmul, int8_matmul], ids=lambda module: module.__name__)
def test_cases_launch_and_name_what_their_launcher_asks_for(kernel: object) -> None:
    cases = list(kernel.tuning_cases(torch.device("cpu"), num_outputs=64, size=128))
    assert [case.whens[0]["m"] for case in cases][:2] == [(1, 8), (9, 16)]
    for case in cases[:2]:
        case.launch(case.candidates[0])
    default = tuning.config_of_card(None, cases[0].kernel, m=1, group=128, dtype="bf16")
    names = {name for case in cases for config in case.candidates for name in config.meta}
    assert names == set(default.meta)


def test_the_command_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        tune.main([])
    assert "no GPU" in capsys.readouterr().err
