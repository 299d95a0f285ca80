"""Quantised products are the same bits with and without the instruction made for them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.engine.quantized_products import digest

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an x86 processor")
def test_a_processor_without_avx512_computes_the_same_bits(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c",
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    elsewhere = subprocess.run(
        [sys.executable, "-m", "tests.unit.engine.quantized_products", "--no-vnni"],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=110, check=True,
    )  # fmt: skip
    assert elsewhere.stdout.split() == [digest()]
