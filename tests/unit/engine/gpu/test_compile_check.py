"""What a compiled kernel is refused for, and the page's table of all variants."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.backends.gpu import compile_check
from engine.backends.gpu.compile_check import Built, Job, Target

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "gpu.md"


def test_the_page_lists_every_variant() -> None:
    jobs = [job for name in compile_check.kernel_names() for job in compile_check.jobs_of(name)]
    expected = list(dict.fromkeys((job.kernel, job.variant) for job in jobs))
    listed = compile_check.listed(PAGE.read_text())
    hint = "run python -m engine.backends.gpu.compile_check --write docs/gpu.md"
    assert listed == expected, hint


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
