"""Start-up configuration of the gateway and of the workers: frozen, validated once.

Built by ``cli`` from flags; ``validate()`` raises a ConfigError whose message begins with the name
of the field at fault. Only what can be judged without the model or the network is judged here.
"""

from __future__ import annotations

import os
import re
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from mesh.errors import ConfigError
from mesh.worker_info import MAX_RANKS, Role

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
Weights = Literal["auto", "fp32", "bf16", "fp16", "int8", "w8a8", "int4"]
KVDtype = Literal["auto", "fp32", "bf16", "fp16", "int8"]
ToolCallParserName = Literal["auto", "hermes", "llama3", "mistral"]
TransportName = Literal["auto", "shm", "ucx", "tcp"]
KVWire = Literal["", "int8"]
Device = Literal["auto", "cpu", "cuda"]

ROLES: tuple[Role, ...] = ("prefill", "decode")
LOG_FORMATS: tuple[LogFormat, ...] = ("text", "json")
LOG_LEVELS: tuple[LogLevel, ...] = ("debug", "info", "warning", "error")
WEIGHTS: tuple[Weights, ...] = ("auto", "fp32", "bf16", "fp16", "int8", "w8a8", "int4")
KV_DTYPES: tuple[KVDtype, ...] = ("auto", "fp32", "bf16", "fp16", "int8")
TOOL_CALL_PARSERS: tuple[ToolCallParserName, ...] = ("auto", "hermes", "llama3", "mistral")
TRANSPORTS: tuple[TransportName, ...] = ("auto", "shm", "ucx", "tcp")
KV_WIRES: tuple[KVWire, ...] = ("", "int8")
DEVICES: tuple[Device, ...] = ("auto", "cpu", "cuda")

MAX_GPU_SLOTS = 8
"""Most workers on one GPU."""

_STAGING_BLOCKS = 64
_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_REDIS_SCHEMES = ("redis", "rediss", "unix")


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a gateway process is told at start."""

    redis_url: str
    """``redis://[:password@]host:port/db`` of the cluster's registry."""
    host: str = "127.0.0.1"
    """Address the HTTP API binds."""
    port: int = 8000
    """TCP port of the HTTP API; 0 takes any free one."""
    model: str = ""
    """Model file or folder for tokenizer and chat template; empty: the packaged default model."""
    served_model_name: str = ""
    """Name clients use in ``model``; empty: the model's own name."""
    tool_call_parser: ToolCallParserName = "auto"
    """How the model writes tool calls; auto: as its chat template shows."""
    request_timeout_s: float = 600.0
    """Deadline of one request, from arrival to last token, in seconds."""
    max_body_bytes: int = 4 << 20
    """Largest accepted HTTP body in bytes."""
    gateway_id: str = ""
    """Unique in the cluster; empty: minted by the gateway at start."""
    log_level: LogLevel = "info"
    """Least severe log records written."""
    log_format: LogFormat = "text"
    """``text``: key=value lines; ``json``: one object a line."""
    otlp_endpoint: str = ""
    """``http://host:port`` of an OpenTelemetry collector; empty: no tracing."""

    def validate(self) -> None:
        """Check every field.

        Raises:
            ConfigError: names the first field at fault.
        """
        _check_redis_url(self.redis_url)
        _check_host("host", self.host)
        _check_range("port", self.port, 0, 65535)
        _check_choice("tool_call_parser", self.tool_call_parser, TOOL_CALL_PARSERS)
        _check_range("request_timeout_s", self.request_timeout_s, 0.1, 86_400)
        _check_range("max_body_bytes", self.max_body_bytes, 1024, 1 << 30)
        if self.gateway_id:
            _check_id("gateway_id", self.gateway_id)
        _check_choice("log_level", self.log_level, LOG_LEVELS)
        _check_choice("log_format", self.log_format, LOG_FORMATS)
        _check_http_url("otlp_endpoint", self.otlp_endpoint)


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a prefill or decode worker process is told at start."""

    role: Role
    """Which of the two roles this process plays."""
    worker_id: str
    """Unique in the cluster; a restarted worker keeps its id and takes a larger epoch."""
    redis_url: str
    """``redis://[:password@]host:port/db`` of the cluster's registry."""
    model: str = ""
    """Model file or folder; empty: the packaged default model."""
    served_model_name: str = ""
    """Name clients use in ``model``; empty: the model's own name."""
    host: str = "127.0.0.1"
    """Address the control socket, the data plane and the HTTP endpoint bind."""
    advertise_host: str = ""
    """Address the peers dial; empty: ``host``. Needed where ``host`` is a wildcard (the role
    commands then take the address that leads to the registry)."""
    control_port: int = 0
    """TCP port of the control socket; 0 takes any free one."""
    http_port: int = 0
    """TCP port of /metrics and /health; 0 takes any free one."""
    device: Device = "auto"
    """What the model runs on; auto: CUDA where there are a GPU and a torch that can use it."""
    weights: Weights = "auto"
    """Weights in memory: ``fp32``, or ``int8`` / ``int4`` in groups of 32 (embedding: 8 bits).
    auto: ``int4`` where the file itself has about 4 bits per weight, else ``int8``. On a GPU
    ``int8`` has a scale per output channel, ``bf16``, ``fp16`` and ``w8a8`` (``int8`` with
    activations quantised, too) are there as well, and auto is what has the file's own precision."""
    kv_dtype: KVDtype = "auto"
    """Storage of the KV cache; auto: fp32 with fp32 weights, else fp16; on a GPU that of the
    activations."""
    kv_blocks: int = 0
    """KV pool size in blocks; 0: as many as ``kv_memory_mib`` holds, or on a GPU as fit beside
    the model."""
    kv_memory_mib: int = 1024
    """KV pool size in MiB where ``kv_blocks`` is 0 and the device is a CPU."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory for weights, activations and KV of the workers on it together."""
    gpu_slots: int = 0
    """Workers that may share one GPU; all of a host must say the same. 0: one."""
    gpu_wait_s: float = 60.0
    """Seconds that a worker waits for a free GPU."""
    block_size: int = 16
    """Token slots per KV block; a power of two."""
    max_num_seqs: int = 128
    """Most sequences in one step."""
    max_batched_tokens: int = 512
    """Most tokens computed in one step (the prefill chunk budget)."""
    max_step_ms: float = 250.0
    """Time that a step should take at most, in ms: prompts get chunks that the worker computes in
    it by its own measured speed. What is to be heard between steps (an abort) waits that long.
    0: any."""
    max_model_len: int = 0
    """Longest sequence in tokens; 0: the model's own limit."""
    transport: TransportName = "auto"
    """Data plane for KV blocks; auto: the best that both workers of a pair have."""
    kv_layer_groups: int = 1
    """Parts of the layers in which KV leaves a prefill worker while a chunk is computed; it must
    divide the model's layers."""
    kv_wire: KVWire = ""
    """``int8``: compress KV on its way, within a host too, for links slower than that takes."""
    tensor_parallel: int = 1
    """Processes among which the model's layers are split; this one is the first of them."""
    threads: int = 0
    """Compute threads; 0: the cores it may use, shared with the workers of ``cores_file``."""
    cores_file: str = ""
    """File through which workers on one machine share its cores; empty: with none."""
    lease_s: float = 10.0
    """Seconds P keeps blocks pinned, and D keeps a grant open, without a sign of life."""
    drain_s: float = 10.0
    """Seconds that running work may take to end after SIGTERM; 0: none."""
    inject_faults: float = 0.0
    """Fault injection: the share of KV writes and transfer messages that go wrong on purpose."""
    log_level: LogLevel = "info"
    """Least severe log records written."""
    log_format: LogFormat = "text"
    """``text``: key=value lines; ``json``: one object a line."""
    otlp_endpoint: str = ""
    """``http://host:port`` of an OpenTelemetry collector; empty: no tracing."""
    profile_dir: str = ""
    """Existing folder for the traces of /debug/profile; empty: it keeps none."""

    def validate(self) -> None:
        """Check every field.

        Raises:
            ConfigError: names the first field at fault.
        """
        _check_choice("role", self.role, ROLES)
        _check_id("worker_id", self.worker_id)
        _check_redis_url(self.redis_url)
        _check_host("host", self.host)
        if self.advertise_host:
            _check_host("advertise_host", self.advertise_host)
        _check_range("control_port", self.control_port, 0, 65535)
        _check_range("http_port", self.http_port, 0, 65535)
        _check_choice("device", self.device, DEVICES)
        _check_choice("weights", self.weights, WEIGHTS)
        _check_choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        _check_range("kv_blocks", self.kv_blocks, 0, 1 << 31)
        _check_range("kv_memory_mib", self.kv_memory_mib, 1, 16 << 20)
        _check_range("gpu_memory_utilization", self.gpu_memory_utilization, 0.01, 1.0)
        _check_range("gpu_slots", self.gpu_slots, 0, MAX_GPU_SLOTS)
        _check_range("gpu_wait_s", self.gpu_wait_s, 0, 86_400)
        _check_range("block_size", self.block_size, 1, 256)
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size: {self.block_size} is not a power of two")
        _check_range("max_num_seqs", self.max_num_seqs, 1, 65536)
        _check_range("max_batched_tokens", self.max_batched_tokens, 1, 1 << 20)
        _check_range("max_step_ms", self.max_step_ms, 0, 600_000)
        _check_range("max_model_len", self.max_model_len, 0, 1 << 24)
        _check_choice("transport", self.transport, TRANSPORTS)
        _check_range("kv_layer_groups", self.kv_layer_groups, 1, 64)
        _check_choice("kv_wire", self.kv_wire, KV_WIRES)
        _check_range("tensor_parallel", self.tensor_parallel, 1, MAX_RANKS)
        _check_range("threads", self.threads, 0, 1024)
        _check_range("lease_s", self.lease_s, 0.1, 3600)
        _check_range("drain_s", self.drain_s, 0, 86_400)
        _check_range("inject_faults", self.inject_faults, 0, 0.5)
        _check_choice("log_level", self.log_level, LOG_LEVELS)
        _check_choice("log_format", self.log_format, LOG_FORMATS)
        _check_http_url("otlp_endpoint", self.otlp_endpoint)
        if self.profile_dir and not os.path.isdir(self.profile_dir):
            raise ConfigError(f"profile_dir: {self.profile_dir} is not a folder")

    @property
    def num_staging_blocks(self) -> int:
        """Blocks of the KV pool that hold compressed KV while it is sent."""
        return _STAGING_BLOCKS if self.role == "prefill" and self.kv_wire else 0

    @property
    def num_gpu_sharers(self) -> int:
        """Workers among which a GPU's memory is divided."""
        return self.gpu_slots or 1

    @property
    def num_gpus(self) -> int:
        """GPUs that one worker computes on."""
        return self.tensor_parallel

    def advertised(self, endpoint: str) -> str:
        """``endpoint`` (``scheme://host:port``) with the host that peers dial."""
        if not self.advertise_host:
            return endpoint
        scheme, _, address = endpoint.partition("://")
        port = address.rpartition(":")[2]
        return f"{scheme}://{self.advertise_host}:{port}"


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{field}: {value} is not between {low} and {high}")


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{field}: {value!r} is not one of {', '.join(choices)}")


def _check_id(field: str, value: str) -> None:
    if not _ID_PATTERN.fullmatch(value):
        raise ConfigError(f"{field}: {value!r} must be 1-128 letters, digits, '.', '_' or '-'")


def _check_host(field: str, value: str) -> None:
    if not value or any(character.isspace() or character == "/" for character in value):
        raise ConfigError(f"{field}: {value!r} is not a host name or address")


def _check_http_url(field: str, value: str) -> None:
    try:
        parts = urlsplit(value)
        usable = not value or (parts.scheme in ("http", "https") and bool(parts.hostname))
        _ = parts.port
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"{field}: expected http://host:port")


def _check_redis_url(value: str) -> None:
    # The value is not echoed: it may carry a password.
    try:
        parts = urlsplit(value)
        port_ok = parts.port is None or parts.port > 0
    except ValueError as error:
        raise ConfigError(f"redis_url: {error}") from error
    if parts.scheme not in _REDIS_SCHEMES or not port_ok:
        raise ConfigError("redis_url: expected redis://[:password@]host:port/db")
    if not (parts.path if parts.scheme == "unix" else parts.hostname):
        raise ConfigError("redis_url: names no server")
