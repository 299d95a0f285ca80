"""The ``pdmesh`` script with a stand-in for Python, which records how it is called."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]

# Makes a .venv whose python is itself; pip and torch fail when told so.
_PYTHON = """\
#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in
    *"-m venv"*)
        for venv; do :; done
        mkdir -p "$venv/bin" && cp "$0" "$venv/bin/python" ;;
    *"pip install"*)
        echo "Collecting something"
        exit "${PIP_EXIT:-0}" ;;
    *"import torch"*) exit "${TORCH_EXIT:-0}" ;;
    *"-m cli"*) echo "cli: $* PYTHONPATH=$PYTHONPATH cwd=$(pwd)" ;;
esac
"""


class Script:
    """A copy of the script in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a folder"
        self.root.mkdir()
        for name in ("pdmesh", "requirements.lock", "requirements-dev.lock"):
            shutil.copy(_ROOT / name, self.root / name)
        self.python = folder / "python"
        self.python.write_text(_PYTHON)
        self.python.chmod(0o755)
        self._calls = folder / "calls"

    def run(
        self, *arguments: str, path: Path | str = "", cwd: Path | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        self._calls.write_text("")
        base = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [str(path or self.root / "pdmesh"), *arguments],
            cwd=cwd or "/",
            env=base | {"PDMESH_PYTHON": str(self.python), "CALLS": str(self._calls)} | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
        )

    def calls(self, text: str) -> int:
        return sum(text in line for line in self._calls.read_text().splitlines())


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def test_the_first_start_installs_and_the_second_goes_straight_on(
    script: Script, tmp_path: Path
) -> None:
    first = script.run("up", "--model", "a b", cwd=tmp_path)
    assert (first.returncode, first.stderr) == (0, ""), "quiet where there is no terminal"
    expected = f"cli: -P -m cli up --model a b PYTHONPATH={script.root} cwd={tmp_path}\n"
    assert first.stdout == expected
    assert script.calls("-m venv") == 1
    assert script.calls("pip install --no-deps") == 1
    second = script.run("up", "--model", "a b", cwd=tmp_path)
    assert second.stdout == expected
    assert script.calls("") == 1, "nothing but the command itself"
    assert {path.name for path in script.root.glob(".venv*")} == {".venv"}


def test_it_works_through_a_link_and_from_its_own_folder(script: Script, tmp_path: Path) -> None:
    link = tmp_path / "bin"
    link.mkdir()
    (link / "pdmesh").symlink_to("../a folder/pdmesh")
    assert f"PYTHONPATH={script.root} " in script.run("up", path=link / "pdmesh").stdout
    assert f"PYTHONPATH={script.root} " in script.run(path="./pdmesh", cwd=script.root).stdout


def test_a_changed_lock_is_installed_into_the_same_venv(script: Script) -> None:
    script.run("up")
    with (script.root / "requirements.lock").open("a") as lock:
        lock.write("one-more==1.0\n")
    script.run("up")
    assert script.calls("pip install") == 1
    assert script.calls("-m venv") == 0


@pytest.mark.parametrize("command", ["test", "check"])
def test_only_the_projects_own_tools_need_the_second_lock(script: Script, command: str) -> None:
    script.run("up")
    script.run(command)
    assert script.calls("requirements-dev.lock") == 1
    script.run(command)
    assert script.calls("pip install") == 0


def test_a_failed_installation_is_told_and_tried_again(script: Script) -> None:
    failed = script.run("up", PIP_EXIT="1")
    assert failed.returncode == 1
    assert "Collecting something" in failed.stderr
    assert "installing requirements.lock failed" in failed.stderr
    assert "cli:" not in failed.stdout
    assert script.run("up").returncode == 0
    assert script.calls("pip install") == 1


def test_a_torch_that_cannot_be_imported_is_told(script: Script) -> None:
    failed = script.run("up", TORCH_EXIT="1")
    assert failed.returncode == 1
    assert "importing torch" in failed.stderr
    assert "PDMESH_PIP_ARGS" in failed.stderr


def test_a_venv_whose_python_is_gone_is_made_anew(script: Script) -> None:
    script.run("up")
    (script.root / ".venv/bin/python").unlink()
    assert script.run("up").returncode == 0
    assert script.calls("-m venv") == 1


def test_the_turn_of_a_killed_installation_is_taken_over(script: Script) -> None:
    turn = script.root / ".venv.turn"
    turn.mkdir()
    with subprocess.Popen(["true"]) as gone:
        pass
    (turn / "pid").write_text(f"{gone.pid}\n")
    assert script.run("up").returncode == 0
    assert not turn.exists()


def test_more_arguments_reach_pip(script: Script) -> None:
    script.run("up", PDMESH_PIP_ARGS="--index-url https://example.org/cpu")
    assert script.calls("--index-url https://example.org/cpu -r ") == 1


def test_without_a_python_it_says_what_it_needs(script: Script) -> None:
    failed = script.run("up", PDMESH_PYTHON="/no/such/python")
    assert failed.returncode == 1
    assert "needs Python 3.11 or newer" in failed.stderr
    assert "/no/such/python" in failed.stderr
