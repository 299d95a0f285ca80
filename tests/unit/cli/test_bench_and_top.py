"""``bench`` finds benchmarks without importing them; ``top`` shows a census."""

from pathlib import Path

import pytest

from cli.bench import benchmarks, run_bench
from cli.main import main
from cli.top import format_census
from mesh.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "serving.py").write_text('"""Load on the API.\n\nMore."""\ndef main(argv): ...\n')
    (tmp_path / "shared_part.py").write_text('"""No command."""\nimport no_such_module\n')
    return tmp_path


def test_only_modules_with_a_main_are_benchmarks(folder: Path) -> None:
    assert benchmarks(folder) == {"serving": "Load on the API."}


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_without_a_name_they_are_listed(
    folder: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_bench(arguments, folder) == 0
    assert "serving              Load on the API." in capsys.readouterr().out


def test_an_unknown_benchmark_names_the_known(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'fly'; there are: serving"):
        run_bench(["fly"], folder)


def test_the_census_as_a_table() -> None:
    text = format_census(
        [
            {
                "id": "decode-0",
                "role": "decode",
                "alive": True,
                "running": 3,
                "waiting": 1,
                "queued_tokens": 0,
                "kv_blocks_total": 200,
                "kv_blocks_free": 150,
                "tokens_per_s": 61.7,
                "step_time_s": 0.0421,
            },
            {"id": "prefill-0", "role": "prefill", "alive": False},
        ]
    )
    heading, first, second = text.splitlines()
    assert heading.split()[0] == "worker"
    assert " ".join(first.split()) == "decode-0 decode yes 3 1 0 25 % 62 42.1 ms"
    assert second.split()[:3] == ["prefill-0", "prefill", "no"]


def test_top_without_a_gateway_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", "http://127.0.0.1:1"]) == 1
    assert "no gateway answers at http://127.0.0.1:1" in capsys.readouterr().err
