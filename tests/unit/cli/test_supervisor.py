"""Process supervision with real, tiny children."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.child_process import ChildProcess, ChildSpec
from cli.log_echo import LogEcho
from cli.supervisor import Supervisor

IGNORES_SIGTERM = "import signal,time;signal.signal(15,signal.SIG_IGN);print('on');time.sleep(60)"
SLEEPS = "import time;print('on');time.sleep(60)"


class Bench:
    """A supervisor with a settable clock that records what it shows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shown: list[str] = []
        self.ahead_s = 0.0
        self.supervisor = Supervisor(
            self.shown.append, clock=lambda: time.monotonic() + self.ahead_s
        )

    def child(self, name: str, code: str, *, ready: bool = True) -> ChildProcess:
        spec = ChildSpec(name=name, argv=[sys.executable, "-I", "-S", "-u", "-c", code])
        child = ChildProcess(spec, self.folder)
        self.supervisor.start(child)
        if ready:
            wait_until(lambda: child.last_log_lines(1) == ["on"])
        return child

    def poll_until(self, condition: Callable[[], object]) -> None:
        def step() -> object:
            self.supervisor.poll()
            return condition()

        wait_until(step)


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.005)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.supervisor.kill()


def test_children_stop_in_order(bench: Bench) -> None:
    record = bench.folder / "order"
    code = (
        "import signal,sys,time\n"
        f"def stop(*_):\n    open({str(record)!r},'a').write('NAME ');sys.exit()\n"
        "signal.signal(15,stop);print('on');time.sleep(60)"
    )
    children = [bench.child(name, code.replace("NAME", name)) for name in ("a", "b", "c")]
    bench.supervisor.stop([[children[2]], [children[0]], [children[1]]], timeout_s=60)
    assert record.read_text() == "c a b "
    assert not any(child.running for child in children)


def test_a_straggler_is_killed_after_the_timeout(bench: Bench) -> None:
    stubborn, polite = bench.child("stubborn", IGNORES_SIGTERM), bench.child("polite", SLEEPS)
    started_s = time.monotonic()
    bench.supervisor.stop([[stubborn], [polite]], timeout_s=0.3)
    assert 0.3 <= time.monotonic() - started_s < 60, "neither would have ended by itself"
    assert stubborn.exit_text == "was killed by SIGKILL"
    assert polite.exit_text == "was killed by SIGTERM"
    assert bench.shown == ["stubborn: did not stop in 0.3 s, killed"]


def test_an_interrupted_stop_still_kills_everything(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = bench.child("stubborn", IGNORES_SIGTERM)

    def interrupt(timeout_s: float) -> bool:
        raise RuntimeError("second signal")

    monkeypatch.setattr(child, "wait", interrupt)
    with pytest.raises(RuntimeError):
        bench.supervisor.stop([[child]], timeout_s=60)
    assert not child.running


def test_killing_takes_what_the_child_started_along(bench: Bench) -> None:
    code = (
        "import subprocess,sys,time\n"
        "p=subprocess.Popen([sys.executable,'-c','import time;time.sleep(60)'])\n"
        "print(p.pid);time.sleep(60)"
    )
    child = bench.child("parent", code, ready=False)
    wait_until(lambda: child.last_log_lines(1))
    grandchild = int(child.last_log_lines(1)[0])
    child.kill()
    wait_until(lambda: _state(grandchild) in ("", "Z"))


def test_a_dead_child_is_restarted_after_a_growing_delay(bench: Bench) -> None:
    child = bench.child("worker", SLEEPS)
    first_pid = child.pid
    assert first_pid is not None
    os.kill(first_pid, signal.SIGKILL)
    wait_until(lambda: not child.running)
    bench.supervisor.poll()
    assert not child.running, "not before the backoff is over"
    assert bench.shown[0].startswith("worker: was killed by SIGKILL, restart in 0.")
    bench.ahead_s += 0.5
    bench.supervisor.poll()
    assert child.running
    assert child.pid != first_pid
    assert bench.shown[-1] == "worker: restarting (1)"
    delays = []
    for _ in range(3):
        child.kill()
        bench.supervisor.poll()
        planned = next(text for text in reversed(bench.shown) if "restart in" in text)
        delays.append(float(planned.rpartition("restart in ")[2].removesuffix(" s")))
        bench.ahead_s += 10
        bench.poll_until(lambda: child.running)
    assert delays == sorted(delays)
    assert delays[-1] > 2


def test_a_child_that_ran_long_starts_over_at_the_first_delay(bench: Bench) -> None:
    child = bench.child("worker", SLEEPS)
    for _ in range(6):
        child.kill()
        bench.supervisor.poll()
        bench.ahead_s += 40
        bench.poll_until(lambda: child.running)
    bench.ahead_s += 61
    child.kill()
    bench.supervisor.poll()
    planned = next(text for text in reversed(bench.shown) if "restart in" in text)
    assert float(planned.rpartition("restart in ")[2].removesuffix(" s")) <= 0.5


def test_what_ended_while_starting_is_found(bench: Bench) -> None:
    bench.child("fine", SLEEPS)
    assert bench.supervisor.first_ended() is None
    broken = bench.child("broken", "import sys;sys.exit('no model')", ready=False)
    wait_until(lambda: bench.supervisor.first_ended() is broken)
    assert broken.exit_text == "exited with code 1"
    assert broken.last_log_lines(5) == ["no model"]


def test_a_program_that_cannot_be_run(bench: Bench) -> None:
    child = ChildProcess(ChildSpec(name="x", argv=["/no/such/program"]), bench.folder)
    with pytest.raises(FileNotFoundError):
        bench.supervisor.start(child)
    assert child.exit_text == "was not started"
    bench.supervisor.kill()


def test_stdin_reaches_the_child_and_its_environment(bench: Bench) -> None:
    code = "import os,sys;print(sys.stdin.read(), os.environ['EXTRA'])"
    spec = ChildSpec(
        name="reader",
        argv=[sys.executable, "-I", "-S", "-c", code],
        env={"EXTRA": "more"},
        stdin=b"secret",
    )
    child = ChildProcess(spec, bench.folder)
    child.start()
    assert child.wait(10)
    assert child.last_log_lines(1) == ["secret more"]


def test_errors_are_echoed_once_and_whole(tmp_path: Path) -> None:
    shown: list[str] = []
    path = tmp_path / "x.log"
    echo = LogEcho(path, "x", shown.append)
    echo.poll()
    with path.open("a") as log:
        log.write("level=INFO msg=fine\nlevel=ERROR msg=ba")
        log.flush()
        echo.poll()
        assert shown == []
        log.write("d\nlevel=WARNING msg=hm\n")
        log.flush()
    echo.poll()
    echo.poll()
    assert shown == ["[x] level=ERROR msg=bad"]


def test_a_flood_of_errors_is_cut(tmp_path: Path) -> None:
    shown: list[str] = []
    path = tmp_path / "x.log"
    path.write_text("level=ERROR msg=bad\n" * 100)
    LogEcho(path, "x", shown.append).poll()
    assert len(shown) == 21
    assert shown[-1] == "[x] … and 80 more errors"


def test_a_log_that_grew_too_large_is_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.log_echo.MAX_LOG_BYTES", 1000)
    shown: list[str] = []
    path = tmp_path / "x.log"
    echo = LogEcho(path, "x", shown.append)
    with path.open("ab") as log:
        log.write(b"x" * 1000 + b"\n")
        log.flush()
        echo.poll()
        assert path.stat().st_size == 0
        log.write(b"level=ERROR msg=after\n")
        log.flush()
        echo.poll()
    assert shown == ["[x] level=ERROR msg=after"]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""
