"""What ``up`` tells of its workers' logs while they compile kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.child_process import ChildProcess, ChildSpec
from cli.kernel_progress import KernelProgress
from cli.progress import Progress

HEAD = "time=2026-01-01T00:00:00.000Z level=INFO proc=prefill-0 pid=1 logger=x msg="


def worker(folder: Path, name: str, *lines: str) -> ChildProcess:
    child = ChildProcess(ChildSpec(name=name, argv=[]), folder)
    with child.log_path.open("a") as log:
        log.writelines(f"{line}\n" for line in lines)
    return child


def test_each_change_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waiting = "compiling kernels for avx2: waiting for another worker"
    begun = "compiling kernels for avx2: 1 of 6 (paged attention), 4 s"
    later = "compiling kernels for avx2: 2 of 6 (paged attention, linear layers), 5 s"
    done = "compiled kernels for avx2 in 23 s"
    progress = Progress()
    decode = worker(tmp_path, "decode-0", json.dumps({"msg": waiting, "pid": 7}))
    prefill = worker(tmp_path, "prefill-0", HEAD + "loading", HEAD + begun)
    kernels = KernelProgress([decode, prefill])
    assert kernels.poll(progress) == begun
    assert kernels.poll(progress) == begun
    worker(tmp_path, "prefill-0", HEAD + later, HEAD + "something else")
    assert kernels.poll(progress) == later
    worker(tmp_path, "prefill-0", HEAD + done)
    assert kernels.poll(progress) == waiting
    shown = [f"decode-0: {waiting}", *(f"prefill-0: {text}" for text in (begun, later, done))]
    assert capsys.readouterr().err.splitlines() == shown


def test_a_worker_that_compiles_nothing_is_not_mentioned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill = worker(tmp_path, "prefill-0", HEAD + "model ready device=cpu")
    absent = ChildProcess(ChildSpec(name="decode-0", argv=[]), tmp_path)
    assert KernelProgress([prefill, absent]).poll(Progress()) == ""
    assert capsys.readouterr().err == ""
