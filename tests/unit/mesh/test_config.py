"""Configuration: defaults are valid, and an error names the field at fault."""

from typing import Any

import msgspec
import pytest

from mesh.config import GatewayConfig, WorkerConfig
from mesh.errors import ConfigError

URL = "redis://:secret@127.0.0.1:6379/0"
GATEWAY = GatewayConfig(redis_url=URL)
WORKER = WorkerConfig(role="prefill", worker_id="prefill-0", redis_url=URL)


def test_the_defaults_are_valid() -> None:
    GATEWAY.validate()
    WORKER.validate()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("host", ""),
        ("host", "a b"),
        ("redis_url", "localhost:6379"),
        ("redis_url", "http://localhost"),
        ("redis_url", "redis://"),
        ("redis_url", "redis://localhost:99999"),
        ("request_timeout_s", 0.0),
        ("request_timeout_s", float("nan")),
        ("max_body_bytes", 0),
        ("gateway_id", "a b"),
        ("log_level", "loud"),
        ("log_format", "xml"),
        ("otlp_endpoint", "localhost:4318"),
        ("otlp_endpoint", "http://host:port"),
    ],
)
def test_a_bad_gateway_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field}:") as caught:
        msgspec.structs.replace(GATEWAY, **{field: value}).validate()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("role", "both"),
        ("worker_id", ""),
        ("worker_id", "-x"),
        ("worker_id", "x" * 129),
        ("redis_url", "ftp://:secret@x"),
        ("host", "a/b"),
        ("advertise_host", "a b"),
        ("control_port", 70000),
        ("http_port", -1),
        ("weights", "fp8"),
        ("kv_blocks", -1),
        ("kv_memory_mib", 0),
        ("device", "tpu"),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 90),
        ("gpu_memory_utilization", float("nan")),
        ("gpu_slots", -1),
        ("gpu_slots", 9),
        ("gpu_wait_s", -1),
        ("block_size", 0),
        ("block_size", 24),
        ("max_num_seqs", 0),
        ("max_batched_tokens", 0),
        ("max_step_ms", -1.0),
        ("max_model_len", -1),
        ("transport", "smoke"),
        ("threads", -1),
        ("lease_s", 0.0),
        ("log_level", ""),
        ("otlp_endpoint", "file:///etc"),
        ("profile_dir", "/nowhere/at/all"),
    ],
)
def test_a_bad_worker_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field}:") as caught:
        msgspec.structs.replace(WORKER, **{field: value}).validate()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("advertise_host", "expected"),
    [
        ("", "tcp://0.0.0.0:5555"),
        ("node-3", "tcp://node-3:5555"),
        ("10.0.0.3", "tcp://10.0.0.3:5555"),
    ],
)
def test_the_advertised_endpoint(advertise_host: str, expected: str) -> None:
    config = msgspec.structs.replace(WORKER, advertise_host=advertise_host)
    assert config.advertised("tcp://0.0.0.0:5555") == expected
