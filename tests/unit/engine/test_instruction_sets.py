"""Every level of vector instructions that this processor has computes the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.backends.cpu.level import VARIABLE, CpuLevel, host_levels, supported

ROOT = Path(__file__).parents[3]
HOST_LEVELS = host_levels()


def computed_at(level: CpuLevel) -> list[str]:
    found = subprocess.run(
        [sys.executable, "-m", "tests.unit.engine.kernel_bits"],
        env={**os.environ, VARIABLE: level}, cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    first, *digests = found.stdout.splitlines()
    assert first == level
    assert len(digests) == 10
    return digests


@pytest.fixture(scope="module")
def at_the_best_level() -> list[str]:
    return computed_at(HOST_LEVELS[-1])


@pytest.mark.timeout(1200)  # kernels are compiled for each level once
@pytest.mark.parametrize("level", HOST_LEVELS[:-1])
def test_a_lower_level_computes_the_same_bits(
    level: CpuLevel, at_the_best_level: list[str]
) -> None:
    assert computed_at(level) == at_the_best_level


def test_a_level_that_the_processor_lacks_is_refused_by_name() -> None:
    found = subprocess.run(
        [sys.executable, "-c", "import engine.backends.cpu.level"],
        env={**os.environ, VARIABLE: "avx1024"}, cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert found.returncode != 0
    assert f"{VARIABLE}: 'avx1024' is not one of " in found.stderr


@pytest.mark.parametrize(
    ("features", "best"),
    [
        ("sse2 avx2 fma f16c", CpuLevel.AVX2),
        ("sse2 avx2 fma f16c avxvnni", CpuLevel.AVX_VNNI),
        ("sse2 avx2 fma f16c avx512f avx512bw avx512dq avx512vl", CpuLevel.AVX512),
        ("sse2 avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512vnni", CpuLevel.AVX512_VNNI),
        ("neon", CpuLevel.GENERIC),
        ("neon dotprod", CpuLevel.NEON_DOTPROD),
        ("neon dotprod i8mm", CpuLevel.NEON_I8MM),
    ],
)
def test_a_processor_has_the_level_of_all_its_features(features: str, best: CpuLevel) -> None:
    assert supported(dict.fromkeys(features.split(), True))[-1] is best


@pytest.mark.parametrize("features", ["sse2 sse4.2", "sse2 avx2", "sse2 avx2 fma avx512f"])
def test_an_x86_of_before_has_none(features: str) -> None:
    assert supported(dict.fromkeys(features.split(), True)) == []
