"""Sharing cores between processes: who computes counts, who rests or died does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.backends.cpu.core_share import CoreShare
from mesh.errors import ConfigError
from mesh.worker_info import Role

ROOT = Path(__file__).parents[3]
WORKER = """
import os, sys
from engine.backends.cpu.core_share import CoreShare
os.sched_getaffinity = lambda pid: range(int(sys.argv[3]))
share = CoreShare(sys.argv[1], sys.argv[2])
for line in sys.stdin:
    print(share.take() if line == "take\\n" else share.give_back(), flush=True)
"""


class Worker:
    """A process that obeys."""

    def __init__(self, path: Path, role: Role, num_cores: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(path), role, str(num_cores)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, what: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def take(self) -> int:
        return int(self.ask("take"))


@contextmanager
def workers(path: Path, roles: list[Role], num_cores: int) -> Iterator[list[Worker]]:
    started = [Worker(path, role, num_cores) for role in roles]
    try:
        yield started
    finally:
        for worker in started:
            worker.process.kill()
            worker.process.communicate()


def test_cores_are_divided_by_the_workers_that_compute(tmp_path: Path) -> None:
    with workers(tmp_path / "cores", ["prefill", "decode", "prefill"], 11) as (
        first,
        decode,
        third,
    ):
        assert first.take() == 11
        assert decode.take() == 6  # the odd one
        assert first.take() == 5
        assert third.take() == 3  # of 4 + 4 + 3, by role and then by who comes first
        assert {first.take(), decode.take()} == {4}
        third.ask("give back")
        assert (first.take(), decode.take()) == (5, 6)
        decode.ask("give back")
        assert first.take() == 11


def test_a_killed_worker_computes_no_more(tmp_path: Path) -> None:
    with workers(tmp_path / "cores", ["decode", "decode"], 2) as (first, second):
        first.take()
        assert second.take() == 1
        first.process.kill()
        first.process.wait()
        assert second.take() == 2


def test_more_workers_than_cores_have_one_each(tmp_path: Path) -> None:
    with workers(tmp_path / "cores", ["decode", "prefill", "decode"], 2) as started:
        for worker in started:
            worker.take()
        assert [worker.take() for worker in started] == [1, 1, 1]


def test_without_a_file_all_cores_are_its_own(tmp_path: Path) -> None:
    assert CoreShare("", "decode").take() == len(os.sched_getaffinity(0))


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cores_file.*no-folder"):
        CoreShare(str(tmp_path / "no-folder" / "cores"), "decode")
