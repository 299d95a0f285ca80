"""The embedded Valkey: reachable with its password only, and gone when it should be."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli import embedded_valkey
from cli.embedded_valkey import EmbeddedValkey
from mesh.errors import Unavailable

_ROOT = Path(__file__).parents[3]


def ask(port: int, *commands: str) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall("".join(f"{command}\r\n" for command in commands).encode())
        return connection.recv(4096).decode()


def test_it_answers_with_the_password_only_and_stops(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path)
    server.start()
    password = server.url.removeprefix("redis://:").partition("@")[0]
    try:
        assert ask(server.port, "PING").startswith("-NOAUTH")
        assert ask(server.port, f"AUTH {password}", "PING").startswith("+OK")
        assert server.child.pid is not None
        command_line = Path(f"/proc/{server.child.pid}/cmdline").read_bytes()
        assert b"valkey-server" in command_line
        assert password.encode() not in command_line
    finally:
        server.stop()
    assert not server.child.running
    with pytest.raises(ConnectionRefusedError):
        ask(server.port, "PING")
    assert [path.name for path in tmp_path.iterdir()] == ["valkey.log"], "nothing is persisted"


def test_a_restarted_child_keeps_port_and_password(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path)
    server.start()
    url = server.url
    server.child.kill()
    server.child.start()
    try:
        assert server._wait_until_answering()
        assert server.url == url
    finally:
        server.stop()


def test_a_server_that_cannot_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_valkey, "_MAX_MEMORY", "nonsense")
    with pytest.raises(Unavailable, match=r"(?s)exited with code 1.*maxmemory nonsense"):
        EmbeddedValkey(tmp_path).start()


def test_it_dies_with_a_killed_owner(tmp_path: Path) -> None:
    code = (
        "import sys,time;from pathlib import Path;from cli.embedded_valkey import EmbeddedValkey\n"
        "s=EmbeddedValkey(Path(sys.argv[1]));s.start();print(s.child.pid,flush=True);time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=_ROOT, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        os.kill(pid, 0)
        owner.send_signal(signal.SIGKILL)
    deadline_s = time.monotonic() + 55
    while Path(f"/proc/{pid}/stat").exists() and _state(pid) != "Z":
        assert time.monotonic() < deadline_s, "the server outlived its owner"
        time.sleep(0.01)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"
