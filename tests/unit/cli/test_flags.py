"""Flags into configurations and back: round trips, defaults, and errors that name the flag."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli import flags
from cli.main import build_parser, main
from mesh.config import GatewayConfig, WorkerConfig
from mesh.errors import ConfigError
from mesh.worker_info import Role

URL = "redis://127.0.0.1:6379/0"
_ROOT = Path(__file__).parents[3]


def parse_worker(role: Role, arguments: list[str]) -> WorkerConfig:
    options = build_parser().parse_args([role, "--redis", URL, *arguments])
    return flags.worker_config(options, role)


def test_the_defaults_are_the_configurations_own() -> None:
    worker = parse_worker("decode", ["--worker-id", "d0"])
    assert worker == WorkerConfig(role="decode", worker_id="d0", redis_url=URL)
    options = build_parser().parse_args(["gateway", "--redis", URL])
    assert flags.gateway_config(options) == GatewayConfig(redis_url=URL)


@given(
    config=st.builds(
        WorkerConfig,
        role=st.sampled_from(["prefill", "decode"]),
        worker_id=st.from_regex(r"[a-z][a-z0-9._-]{0,20}", fullmatch=True),
        redis_url=st.just(URL),
        model=st.sampled_from(["", "-odd name.gguf", "/models/a b", "é"]),
        served_model_name=st.sampled_from(["", "--name", "org/model"]),
        host=st.sampled_from(["127.0.0.1", "0.0.0.0"]),
        advertise_host=st.sampled_from(["", "node-3"]),
        control_port=st.integers(0, 65535),
        http_port=st.integers(0, 65535),
        weights=st.sampled_from(["fp32", "int8"]),
        kv_blocks=st.integers(0, 1 << 20),
        kv_memory_mib=st.integers(1, 1 << 20),
        device=st.sampled_from(["auto", "cpu", "cuda"]),
        gpu_memory_utilization=st.floats(0.01, 1.0),
        gpu_slots=st.integers(0, 8),
        gpu_wait_s=st.floats(0, 86_400),
        block_size=st.sampled_from([1, 8, 16, 256]),
        max_num_seqs=st.integers(1, 65536),
        max_batched_tokens=st.integers(1, 1 << 20),
        max_step_ms=st.floats(0, 600_000),
        max_model_len=st.integers(0, 1 << 24),
        transport=st.sampled_from(["ucx", "tcp"]),
        threads=st.integers(0, 1024),
        lease_s=st.floats(0.1, 3600),
        log_level=st.sampled_from(["debug", "info", "warning", "error"]),
    )
)
def test_a_worker_configuration_survives_its_command_line(config: WorkerConfig) -> None:
    assert parse_worker(config.role, flags.as_arguments(config)) == config


@given(
    config=st.builds(
        GatewayConfig,
        redis_url=st.just(URL),
        host=st.sampled_from(["127.0.0.1", "0.0.0.0"]),
        port=st.integers(0, 65535),
        model=st.sampled_from(["", "-odd.gguf"]),
        served_model_name=st.sampled_from(["", "org/model"]),
        request_timeout_s=st.floats(0.1, 86_400),
        max_body_bytes=st.integers(1024, 1 << 30),
        gateway_id=st.sampled_from(["", "g-1"]),
        log_level=st.sampled_from(["debug", "error"]),
    )
)
def test_a_gateway_configuration_survives_its_command_line(config: GatewayConfig) -> None:
    options = build_parser().parse_args(["gateway", "--redis", URL, *flags.as_arguments(config)])
    assert flags.gateway_config(options) == config


def test_no_command_line_carries_the_redis_url() -> None:
    secret = "redis://:secret@127.0.0.1:6379/0"
    for config in (
        GatewayConfig(redis_url=secret),
        WorkerConfig(role="decode", worker_id="d0", redis_url=secret),
    ):
        assert "secret" not in " ".join(flags.as_arguments(config))


def test_the_redis_url_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flags.REDIS_URL_VARIABLE, "redis://elsewhere:1/0")
    options = build_parser().parse_args(["prefill"])
    assert flags.worker_config(options, "prefill").redis_url == "redis://elsewhere:1/0"


def test_minted_worker_ids_differ() -> None:
    first, second = parse_worker("decode", []), parse_worker("decode", [])
    assert first.worker_id.startswith("decode-")
    assert first.worker_id != second.worker_id


@pytest.mark.parametrize(
    ("command", "arguments", "text"),
    [
        ("prefill", ["--redis", URL, "--block-size", "24"], "--block-size: 24"),
        ("decode", ["--redis", URL, "--kv-memory-mib", "0"], "--kv-memory-mib: 0"),
        ("decode", ["--redis", "nonsense"], "--redis:"),
        ("decode", [], "--redis:"),
        ("gateway", ["--redis", URL, "--port", "70000"], "--port: 70000"),
        ("up", ["--max-num-seqs", "0"], "--max-num-seqs: 0"),
        ("up", ["--model", "/no/such/model"], "--model: /no/such/model does not exist"),
        ("up", ["--host", "no such host"], "--host:"),
        ("up", ["--redis", "redis://127.0.0.1:1/0"], "--redis: cannot connect to 127.0.0.1:1"),
    ],
)
def test_a_wrong_value_is_told_by_its_flag(
    command: str,
    arguments: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(flags.REDIS_URL_VARIABLE, raising=False)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    assert main([command, *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"pdmesh {command}: error: {text}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["up", "--prefill", "0"],
        ["up", "--decode", "x"],
        ["up", "--weights", "fp8"],
        ["up", "--transport", "inproc"],
        ["up", "--no-such-flag"],
        ["decode", "--port", "1"],
    ],
)
def test_wrong_use_is_exit_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize("command", ["up", "gateway", "prefill", "decode", "top"])
def test_help_explains_every_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    subparsers = build_parser()._subparsers
    assert subparsers is not None
    parser = subparsers._group_actions[0].choices[command]  # type: ignore[index]
    for action in parser._actions:
        assert action.help, f"{action.dest} has no help"
        assert action.option_strings[-1] in text


def test_the_command_line_imports_nothing_heavy() -> None:
    code = (
        "import sys, cli.main, cli.up\n"
        "heavy = {'torch', 'numpy', 'redis', 'zmq', 'aiohttp', 'rich', 'asyncio'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_an_unknown_field_in_an_error_is_left_alone() -> None:
    assert str(flags.flag_error(ConfigError("something: odd"))) == "something: odd"
    assert str(flags.flag_error(ConfigError("kv_blocks: odd"))) == "--kv-blocks: odd"


def test_every_field_of_a_configuration_has_a_flag() -> None:
    for kind, table in ((GatewayConfig, flags.GATEWAY_ROLE), (WorkerConfig, flags.WORKER_ROLE)):
        fields = {field.name for field in msgspec.structs.fields(kind)}
        assert fields - {flag.field for flag in table} <= {"redis_url", "role"}
