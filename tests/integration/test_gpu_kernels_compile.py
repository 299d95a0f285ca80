"""Every kernel variant compiles for GPUs that are not here, and a faulty one is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_compiler(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: kernels that the interpreter runs can't be compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.timeout(600)
def test_every_variant_compiles_without_spills_and_within_shared_memory() -> None:
    # Not at the top: Triton may not be imported before the units choose its interpreter.
    from engine.backends.gpu import compile_check

    run = run_compiler("-m", "engine.backends.gpu.compile_check")
    assert run.returncode == 0, run.stderr
    kernels = {name for name, _ in compile_check.rows_of(run.stdout)}
    assert kernels == set(compile_check.kernel_names())
    assert "fails" not in run.stdout


@pytest.mark.timeout(300)
def test_faulty_kernels_are_refused() -> None:
    run = run_compiler("-m", "tests.unit.engine.gpu.check_faulty_kernels")
    assert run.returncode == 0, run.stderr
    faults = json.loads(run.stdout)
    assert faults.pop("sound") == []
    (fault,) = faults.pop("too few threads")
    assert fault.startswith("spills ")
    (fault,) = faults.pop("too many stages")
    assert fault.endswith("bytes of shared memory")
    (fault,) = faults.pop("not a size")
    assert "power of 2" in fault
    (fault,) = faults.pop("no type of out")
    assert "out_ptr" in fault
    assert not faults
