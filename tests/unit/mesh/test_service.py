"""The life of a process: signals, log lines, epoch, its HTTP server, death with the parent."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from mesh.errors import ConfigError
from mesh.service import metrics_handler, process_epoch, run_service, serve_http, setup_logging
from tests.unit.mesh.until import until

_ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_sets_the_stop_event(number: signal.Signals) -> None:
    stopped = []

    async def main(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), 60)
        stopped.append(True)

    run_service(main)
    assert stopped == [True]


def test_a_second_signal_cancels() -> None:
    cancelled = []

    async def main(stop: asyncio.Event) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(stop.wait(), 60)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    run_service(main)
    assert cancelled == [True]


def test_a_failure_of_main_reaches_the_caller() -> None:
    async def main(stop: asyncio.Event) -> None:
        raise ConfigError("model: no such file")

    with pytest.raises(ConfigError, match="no such file"):
        run_service(main)


def test_the_epoch_grows() -> None:
    assert process_epoch() < process_epoch()


def test_one_line_for_each_record(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        setup_logging("info", "decode-0")
        logging.getLogger("x").info("two\nlines n=%d", 3)
        logging.getLogger("x").debug("not written")
        try:
            raise RuntimeError("boom")
        except RuntimeError:
            logging.getLogger("x").exception("failed")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "level=INFO proc=decode-0" in lines[0]
    assert lines[0].endswith("logger=x msg=two\\nlines n=3")
    assert "level=ERROR" in lines[1]
    assert "boom" in lines[1]


async def test_the_http_server_serves_its_routes() -> None:
    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    server = await serve_http("127.0.0.1", 0, {"/health": health, "/metrics": metrics_handler})
    assert server.port > 0
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{server.endpoint}/health") as response:
            assert await response.json() == {"status": "ok"}
        async with session.get(f"{server.endpoint}/metrics") as response:
            assert "pdmesh:link_bad_messages" in await response.text()
            assert response.headers["Content-Type"].startswith("text/plain")
        async with session.get(f"{server.endpoint}/other") as response:
            assert response.status == 404
    with pytest.raises(ConfigError, match="cannot bind"):
        await serve_http("127.0.0.1", server.port, {})
    await server.close()


def test_a_child_dies_with_a_killed_parent() -> None:
    child = "import os,time;from mesh.parent_watch import die_with_parent;" + (
        "die_with_parent(os.getppid());print(os.getpid(),flush=True);time.sleep(60)"
    )
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import subprocess,sys;subprocess.run([sys.executable,'-c',{child!r}])",
        ],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    asyncio.run(until(lambda: not _alive(child_pid)))


def test_a_child_whose_parent_is_already_gone_exits() -> None:
    code = "from mesh.parent_watch import die_with_parent;die_with_parent(1 << 22);print('alive')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (1, "")


def _alive(pid: int) -> bool:
    # A zombie that nobody reaps (its new parent is not ours) counts as dead.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
