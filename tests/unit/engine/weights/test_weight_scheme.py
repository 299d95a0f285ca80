"""``--weights auto``: 4-bit files stay at 4 bits, all else is held in 8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.backends.cpu.level import CpuLevel
from engine.device import DeviceKind
from mesh.config import Weights, WorkerConfig
from mesh.errors import ConfigError
from tests.unit.engine.weights.gguf_file import write_gguf
from worker.start import weight_scheme


def scheme(model: Path | None, weights: Weights = "auto", device: DeviceKind = "cpu") -> str:
    path = str(model or "")
    config = WorkerConfig(
        role="decode", worker_id="d", redis_url="redis://h", model=path, weights=weights
    )
    return weight_scheme(config, device)


@pytest.mark.parametrize(
    ("storage", "expected"),
    [("Q4_0", "int4"), ("Q5_0", "int8"), ("Q8_0", "int8"), ("F16", "int8"), ("F32", "int8")],
)
def test_by_the_bits_of_a_gguf_file(
    storage: str, expected: str, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model("llama"), storage=storage)
    assert scheme(tmp_path / "m.gguf") == expected


def test_safetensors_are_held_in_8_bits(saved_model: Callable[..., tuple[Any, Path]]) -> None:
    assert scheme(saved_model("qwen3")[1]) == "int8"


def test_the_packaged_model_is_a_4_bit_file_and_a_given_scheme_is_kept() -> None:
    assert scheme(None) == "int4"
    assert scheme(None, "fp32") == "fp32"


def test_a_cpu_that_multiplies_no_bytes_holds_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.backends.cpu.level.LEVEL", CpuLevel.GENERIC)
    assert scheme(None) == "fp32"
    assert scheme(None, "int4") == "int4"
    assert scheme(None, device="cuda") == "int4"


@pytest.mark.parametrize("weights", ["bf16", "fp16", "w8a8"])
def test_what_a_cpu_does_not_compute_with_is_refused(weights: Weights) -> None:
    with pytest.raises(ConfigError, match=f"^weights: {weights} needs a GPU"):
        scheme(None, weights)


@pytest.mark.parametrize("weights", ["fp32", "bf16", "fp16", "int8", "w8a8", "int4"])
def test_a_gpu_computes_with_every_scheme(weights: Weights) -> None:
    assert scheme(None, weights, "cuda") == weights


@pytest.mark.parametrize(
    ("storage", "expected"), [("Q4_0", "int4"), ("Q8_0", "int8"), ("F16", "bf16")]
)
def test_a_gpu_keeps_the_files_own_precision(
    storage: str, expected: str, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model("llama"), storage=storage)
    assert scheme(tmp_path / "m.gguf", device="cuda") == expected
