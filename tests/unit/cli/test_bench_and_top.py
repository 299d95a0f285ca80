"""``bench`` finds benchmarks without importing them; ``top`` shows the dashboard as text."""

from pathlib import Path

import pytest

from cli.bench import benchmarks, run_bench
from cli.main import main
from cli.top import format_figures
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


SPENT = dict.fromkeys(("queue_s", "prefill_s", "kv_wait_s", "kv_exposed_s", "decode_queue_s"), 0.1)
FIGURES = {
    "model": "m",
    "ready": True,
    "draining": False,
    "open_requests": 2,
    "summary": {
        "window_s": 60.0, "finished": 5, "failed": 1, "output_tokens_per_s": 61.7,
        "prompt_tokens_per_s": 10.0, "ttft_p50_s": 0.0421, "ttft_p95_s": 1.5, "ttft_p99_s": 2.0,
        "tpot_p50_s": None, "tpot_p95_s": None, "tpot_p99_s": None,
    },
    "series": {"ttft_p95_s": [0.0, None, 1.0, 2.0], "tpot_p95_s": []},
    "workers": [
        {
            "id": "decode-0", "role": "decode", "state": "up", "load_age_s": 0.1, "running": 3,
            "waiting": 1, "queued_tokens": 0, "kv_blocks_total": 200, "kv_blocks_free": 150,
            "open_transfers": 2, "kv_blocks_quarantined": 4, "tokens_per_s": 61.7,
            "step_time_s": 0.0421,
        },
        {"id": "prefill-0", "role": "prefill", "state": "down", "load_age_s": None},
    ],
    "flows": [
        {
            "prefill": "prefill-0", "decode": "decode-0", "transfers": 3, "bytes": 3 << 20,
            "hidden_s": 0.5, "exposed_s": 0.25, "wait_s": 0.0,
        }
    ],
    "requests": [
        {
            "id": "0123456789", "prompt_tokens": 20, "output_tokens": 5, "ttft_s": 0.3,
            "total_s": 1.25, "outcome": "length", "parts": {**SPENT, "decode_s": 0.4},
        }
    ],
}  # fmt: skip


def test_the_dashboard_as_text() -> None:
    lines = [" ".join(line.split()) for line in format_figures(FIGURES).splitlines()]
    assert lines[0].startswith("m: ready, 2 requests open; last 60 s: 5 finished, 1 failed; 62 out")
    assert lines[1] == "TTFT p50 42.1 ms p95 1.50 s p99 2.00 s p95 over time ▁ ▅█"
    assert lines[2] == "TPOT p50 - p95 - p99 - p95 over time"
    assert lines[4].startswith("worker role state KV used")
    assert lines[5] == "decode-0 decode up 25 % 3 1 0 2 4 42.1 ms 62"
    assert lines[6] == "prefill-0 prefill down - - - - - - - -"
    assert lines[9] == "prefill-0 → decode-0 3 3.0 MiB 500.0 ms 250.0 ms 0.0 ms"
    assert lines[12] == (
        "01234567 20 → 5 300.0 ms 100.0 ms 100.0 ms 200.0 ms 500.0 ms 1.25 s length"
    )


def test_figures_that_are_old_are_marked() -> None:
    worker = {**FIGURES["workers"][0], "load_age_s": 12.2}
    assert " 12 s old " in format_figures({**FIGURES, "workers": [worker]})


def test_top_without_a_gateway_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", "http://127.0.0.1:1"]) == 1
    assert "no gateway answers at http://127.0.0.1:1" in capsys.readouterr().err
