"""Kernels are compiled once for all workers of a cache, ahead of their steps, and only there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.backends.cpu.kernel_calls import PARTS
from tests.unit.engine.tiny_llama import TinyLlama

ROOT = Path(__file__).parents[2]
_LONGEST_S = 900.0

pytestmark = pytest.mark.timeout(2 * _LONGEST_S)


class Started:
    """A worker's engine in a process of its own, with its kernels in ``cache``."""

    def __init__(self, cache: Path, model: Path, *flags: str) -> None:
        module = "tests.integration.started_worker"
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(model), *flags],
            env=_environment(cache), cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def result(self) -> tuple[dict[str, Any], str]:
        """What it printed, and its log."""
        out, log = self.process.communicate(timeout=_LONGEST_S)
        assert self.process.returncode == 0, log
        return json.loads(out), log

    def compiling(self) -> list[int]:
        """Its processes that compile."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = path.joinpath("stat").read_text().rpartition(")")[2].split()[1]
                words = path.joinpath("cmdline").read_bytes().decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == str(self.process.pid) and "compile_process" in words:
                found.append(int(path.name))
        return found


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return TinyLlama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, tiny_llama: TinyLlama) -> tuple[Path, str]:
    """A cache that two workers filled at once, and the digest of what both computed."""
    cache = tmp_path_factory.mktemp("filled")
    workers = [Started(cache, tiny_llama.folder) for _ in range(2)]
    (first, first_log), (second, second_log) = [worker.result() for worker in workers]
    assert first == second
    assert first["compiled"] == []
    ends = ["compiled kernels for" in log for log in (first_log, second_log)]
    assert sorted(ends) == [False, True]
    return cache, first["digest"]


def test_two_workers_at_once_compile_once_and_a_later_one_nothing(
    filled: tuple[Path, str], tiny_llama: TinyLlama
) -> None:
    cache, digest = filled
    before = _files(cache)
    assert before
    result, log = Started(cache, tiny_llama.folder).result()
    assert result == {"compiled": [], "digest": digest}
    assert "compiling" not in log
    assert _files(cache) == before


def test_kernels_compute_the_same_bits_wherever_they_were_compiled(
    filled: tuple[Path, str], tmp_path: Path, tiny_llama: TinyLlama
) -> None:
    _, digest = filled
    fresh, _ = Started(tmp_path, tiny_llama.folder, "--alone").result()
    loaded, _ = Started(tmp_path, tiny_llama.folder, "--alone").result()
    assert fresh["compiled"]
    assert loaded == {"compiled": [], "digest": digest}
    assert fresh["digest"] == digest


def test_a_worker_whose_compiling_process_is_killed_compiles_the_rest(
    tmp_path: Path, tiny_llama: TinyLlama
) -> None:
    worker = Started(tmp_path, tiny_llama.folder)
    for pid in _until_compiling(worker):
        os.kill(pid, signal.SIGKILL)
    result, log = worker.result()
    assert "exit codes" in log
    assert result["compiled"]
    # Nothing says that all is there: the next one looks, and compiles what is missing.
    result, log = Started(tmp_path, tiny_llama.folder).result()
    assert result["compiled"] == []
    assert "compiled kernels for" in log


def test_a_killed_worker_leaves_no_process_and_no_lock(
    tmp_path: Path, tiny_llama: TinyLlama
) -> None:
    worker = Started(tmp_path, tiny_llama.folder)
    pids = _until_compiling(worker)
    worker.process.kill()
    worker.process.communicate()
    deadline_s = time.monotonic() + 30.0
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    result, _ = Started(tmp_path, tiny_llama.folder).result()
    assert result["compiled"] == []


def test_the_parts_share_no_kernel_and_are_all_that_a_worker_needs(
    tmp_path: Path, tiny_llama: TinyLlama
) -> None:
    # int4 has the most kernels: with 8 bits for its head.
    caches = {part: tmp_path / part for part in PARTS}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "engine.backends.cpu.compile_process", part, "int4", "int8"],
            env=_environment(cache), cwd=ROOT, stdout=subprocess.DEVNULL,
        )
        for part, cache in caches.items()
    ]  # fmt: skip
    assert [process.wait(_LONGEST_S) for process in processes] == [0, 0]
    attention, others = (set(_files(cache)) for cache in caches.values())
    assert attention
    assert others
    assert not attention & others
    whole = tmp_path / "whole"
    for cache in caches.values():
        shutil.copytree(cache, whole, dirs_exist_ok=True)
    flags = ("--weights=int4", "--kv-dtype=int8", "--alone")
    result, _ = Started(whole, tiny_llama.folder, *flags).result()
    assert result["compiled"] == []


def _environment(cache: Path) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_CACHE")}
    return {**inherited, "PDMESH_KERNEL_CACHE": str(cache)}


def _files(cache: Path) -> dict[str, int]:
    """Time of the last change of each kernel's files, by their names within the cache."""
    found = cache.rglob("*.nb?")
    return {str(path.relative_to(cache)): path.stat().st_mtime_ns for path in found}


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _until_compiling(worker: Started) -> list[int]:
    """The processes that compile, once there are all."""
    deadline_s = time.monotonic() + _LONGEST_S
    while len(pids := worker.compiling()) < len(PARTS):
        assert worker.process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return pids
