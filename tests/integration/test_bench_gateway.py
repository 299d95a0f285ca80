"""``pdmesh bench gateway``: a real gateway between workers that compute nothing and clients."""

import json
from pathlib import Path

import pytest

from benchmarks.gateway import main


def test_the_gateways_cost_is_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs.json"
    kind = ["--streams", "4", "--step-ms", "20", "--output", "16"]
    assert main([*kind, "--seconds", "1", "--profile", "--json", str(file)]) == 0
    [run] = json.loads(file.read_text())["runs"]
    assert (run["streams"], run["step_ms"], run["name"]) == (4, 20.0, "this")
    # Four streams at a token every 20 ms, less what lies between two answers.
    assert 20 < run["tokens_per_s"] <= 4 / 0.020 * 1.2
    assert 0 < run["gateway_cores"] <= 2
    assert 0 < run["ttft_added_p50_ms"] <= run["ttft_added_p99_ms"]
    assert run["to_worker_p50_ms"] > 0
    assert run["back_p50_ms"] > 0
    assert "tottime" in capfd.readouterr().out, "the profile is printed"
