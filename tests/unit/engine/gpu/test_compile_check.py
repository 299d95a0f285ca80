"""Every kernel variant compiles for GPUs that are not here, and the page's table is complete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.backends.gpu import compile_check
from engine.backends.gpu.compile_check import Built, Job, Target

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "gpu.md"


def run_compiler(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the interpreter's kernels of this one can't be compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.timeout(600)
def test_every_variant_compiles_without_spills_and_within_shared_memory() -> None:
    run = run_compiler("-m", "engine.backends.gpu.compile_check")
    assert run.returncode == 0, run.stderr
    kernels = {name for name, _ in compile_check.rows_of(run.stdout)}
    assert kernels == set(compile_check.kernel_names())
    assert "fails" not in run.stdout


def test_the_page_lists_every_variant() -> None:
    jobs = [job for name in compile_check.kernel_names() for job in compile_check.jobs_of(name)]
    expected = list(dict.fromkeys((job.kernel, job.variant) for job in jobs))
    listed = compile_check.listed(PAGE.read_text())
    hint = "run python -m engine.backends.gpu.compile_check --write docs/gpu.md"
    assert listed == expected, hint


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


def test_tensor_memory_has_a_limit() -> None:
    job = Job("matmul", "large", Target(100))
    assert Built(job, tensor_columns=512).faults() == []
    assert Built(job, tensor_columns=544).faults() == ["needs 544 columns of tensor memory"]


def test_the_interpreter_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compile_check.main([])
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err


def test_a_table_replaces_only_what_is_between_the_marks() -> None:
    jobs = [Job("norm", "width 8", Target(capability)) for capability in (80, 90)]
    table = compile_check.table([Built(jobs[0], 30, 0, 2048), Built(jobs[1], 31)])
    assert "| norm | width 8 | 30 / 2 | 31 / 0 |  |" in table
    page = f"before\n{compile_check.START_MARK}\nold\n{compile_check.END_MARK}\nafter\n"
    written = compile_check.with_table(page, table)
    assert compile_check.listed(written) == [("norm", "width 8")]
    assert written.startswith("before\n")
    assert written.endswith("\nafter\n")
    assert "old" not in written
    with pytest.raises(ValueError, match="no <!-- compile table"):
        compile_check.with_table("no marks", table)
