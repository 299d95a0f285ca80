"""Flags of the commands that start processes, and their way into configurations and back.

A flag is named for the configuration field it sets, so one table serves parsing, validation errors
(``kv_blocks: …`` becomes ``--kv-blocks: …``) and the command lines of the children of ``up``.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mesh.config import (
    DEVICES,
    KV_DTYPES,
    KV_WIRES,
    LOG_FORMATS,
    LOG_LEVELS,
    TOOL_CALL_PARSERS,
    TRANSPORTS,
    WEIGHTS,
    GatewayConfig,
    WorkerConfig,
)
from mesh.errors import ConfigError
from mesh.worker_info import Role

REDIS_URL_VARIABLE = "PDMESH_REDIS_URL"
"""Read where --redis is not given: keeps the password out of the process list."""


@dataclass(frozen=True, slots=True)
class _Flag:
    field: str
    kind: type
    metavar: str
    help: str
    choices: Sequence[str] | None = None
    flag: str = ""

    @property
    def name(self) -> str:
        return self.flag or "--" + self.field.replace("_", "-")


_MODEL_FLAGS = (
    _Flag("model", str, "PATH", "GGUF file or Hugging Face folder (default: the packaged model)"),
    _Flag("served_model_name", str, "NAME", "name clients use (default: the model's own)"),
)
_LOG_FLAGS = (
    _Flag("log_level", str, "LEVEL", "least severe log records written", LOG_LEVELS),
    _Flag("log_format", str, "FORMAT", "form of log records, one a line", LOG_FORMATS),
    _Flag("otlp_endpoint", str, "URL", "OpenTelemetry collector, http://host:port; empty: none"),
)
_GATEWAY_FLAGS = (
    _Flag("host", str, "ADDRESS", "address the HTTP API binds"),
    _Flag("port", int, "PORT", "port of the HTTP API; 0 takes any free one"),
)
_REQUEST_FLAGS = (
    _Flag(
        "tool_call_parser",
        str,
        "NAME",
        "how the model writes tool calls; auto: as its chat template shows",
        TOOL_CALL_PARSERS,
    ),
    _Flag("request_timeout_s", float, "SECONDS", "deadline of one request"),
    _Flag("max_body_bytes", int, "BYTES", "largest accepted HTTP body"),
)
_ENGINE_FLAGS = (
    _Flag(
        "device",
        str,
        "NAME",
        "what the model runs on; auto: cuda where a GPU and a torch for it are there",
        DEVICES,
    ),
    _Flag("weights", str, "KIND", "how weights are held in memory", WEIGHTS),
    _Flag(
        "kv_dtype",
        str,
        "KIND",
        "how the KV cache is stored; auto: fp16, fp32 with fp32 weights",
        KV_DTYPES,
    ),
    _Flag("kv_memory_mib", int, "MIB", "KV pool of one worker on CPUs, in MiB"),
    _Flag(
        "kv_blocks",
        int,
        "BLOCKS",
        "KV pool of one worker, in blocks; 0: by --kv-memory-mib, on a GPU what is left",
    ),
    _Flag(
        "gpu_memory_utilization",
        float,
        "SHARE",
        "how much of a GPU's memory its workers use, from 0 to 1",
    ),
    _Flag(
        "gpu_slots", int, "WORKERS", "workers that may share a GPU; 0: one, as many as needed by up"
    ),
    _Flag("gpu_wait_s", float, "SECONDS", "how long a worker waits for a free GPU"),
    _Flag("block_size", int, "TOKENS", "token slots per KV block, a power of two"),
    _Flag("max_num_seqs", int, "SEQUENCES", "most sequences in one step"),
    _Flag("max_batched_tokens", int, "TOKENS", "most tokens computed in one step"),
    _Flag(
        "max_step_ms",
        float,
        "MS",
        "time a step should take: chunks of prompts are as large as its own speed allows; 0: any",
    ),
    _Flag("max_model_len", int, "TOKENS", "longest sequence; 0: the model's limit"),
    _Flag(
        "transport",
        str,
        "NAME",
        "data plane of KV blocks; auto: the best that a pair has",
        TRANSPORTS,
    ),
    _Flag(
        "kv_layer_groups",
        int,
        "GROUPS",
        "groups of layers in which KV leaves a prefill worker; they divide the model's layers",
    ),
    _Flag(
        "kv_wire",
        str,
        "KIND",
        "int8: compress all KV on its way, for slow links (default: as it is)",
        KV_WIRES,
    ),
    _Flag(
        "tensor_parallel",
        int,
        "RANKS",
        "processes among which a worker's layers are split; they divide the model's KV heads",
    ),
    _Flag("threads", int, "THREADS", "compute threads of one worker; 0: all cores, shared"),
    _Flag("lease_s", float, "SECONDS", "how long a transfer lives without a sign of life"),
    _Flag("profile_dir", str, "FOLDER", "where /debug/profile leaves traces (default: nowhere)"),
    _Flag(
        "inject_faults",
        float,
        "SHARE",
        "fault injection: this share of KV transfer steps fails on purpose",
    ),
)
_WORKER_FLAGS = (
    _Flag("worker_id", str, "ID", "unique in the cluster (default: role, host and a random part)"),
    _Flag("host", str, "ADDRESS", "address that control, data and HTTP sockets bind"),
    _Flag(
        "advertise_host",
        str,
        "ADDRESS",
        "address the peers dial (default: --host, or the one that leads to --redis)",
    ),
    _Flag("control_port", int, "PORT", "port of the control socket; 0 takes any free one"),
    _Flag("http_port", int, "PORT", "port of /metrics and /health; 0 takes any free one"),
    _Flag("drain_s", float, "SECONDS", "how long running work may take to end after SIGTERM"),
    _Flag(
        "cores_file",
        str,
        "FILE",
        "workers that compute at the same time share the cores with those of the same file",
    ),
)
_GATEWAY_ID_FLAGS = (_Flag("gateway_id", str, "ID", "unique in the cluster (default: random)"),)

GATEWAY_ROLE = (*_GATEWAY_FLAGS, *_MODEL_FLAGS, *_REQUEST_FLAGS, *_GATEWAY_ID_FLAGS, *_LOG_FLAGS)
WORKER_ROLE = (*_WORKER_FLAGS, *_MODEL_FLAGS, *_ENGINE_FLAGS, *_LOG_FLAGS)
UP = (*_GATEWAY_FLAGS, *_MODEL_FLAGS, *_ENGINE_FLAGS, *_REQUEST_FLAGS, *_LOG_FLAGS)


def add_flags(
    parser: argparse.ArgumentParser, flags: Sequence[_Flag], *, redis_else: str = ""
) -> None:
    """Add ``flags`` and --redis; the defaults shown are the configurations' own.

    Args:
        parser: of one command.
        flags: one of the tables above.
        redis_else: what happens without any Redis URL; empty: the command fails.
    """
    parser.add_argument(
        "--redis",
        dest="redis_url",
        metavar="URL",
        default=os.environ.get(REDIS_URL_VARIABLE, ""),
        help=f"redis://[:password@]host:port/db of the registry (default: ${REDIS_URL_VARIABLE}"
        + (f", else {redis_else})" if redis_else else ")"),
    )
    for flag in flags:
        default = _defaults().get(flag.field)
        choices = f": {', '.join(flag.choices)}" if flag.choices else ""
        shown = "" if default in ("", None) or "default" in flag.help else f" (default: {default})"
        parser.add_argument(
            flag.name,
            dest=flag.field,
            type=flag.kind,
            metavar=flag.metavar,
            choices=flag.choices,
            default=default,
            help=flag.help + choices + shown,
        )


def gateway_config(options: argparse.Namespace) -> GatewayConfig:
    """Configuration of a gateway from parsed flags, validated.

    Raises:
        ConfigError: names the flag at fault.
    """
    config = GatewayConfig(**_fields(options, GatewayConfig))
    _validate(config)
    return config


def worker_config(options: argparse.Namespace, role: Role, worker_id: str = "") -> WorkerConfig:
    """Configuration of a worker from parsed flags, validated.

    Args:
        options: parsed flags.
        role: the worker's role.
        worker_id: its id; empty: --worker-id, or a new one.

    Raises:
        ConfigError: names the flag at fault.
    """
    fields = _fields(options, WorkerConfig)
    fields["worker_id"] = worker_id or fields.get("worker_id") or _mint_worker_id(role)
    config = WorkerConfig(**{**fields, "role": role})
    _validate(config)
    return config


def as_arguments(config: GatewayConfig | WorkerConfig) -> list[str]:
    """Command line from which the role command makes ``config`` again, save the Redis URL."""
    flags = GATEWAY_ROLE if isinstance(config, GatewayConfig) else WORKER_ROLE
    arguments = []
    for flag in flags:
        # One word each: a value may begin with a dash.
        value = getattr(config, flag.field)
        if value != "":
            arguments.append(f"{flag.name}={value}")
    return arguments


def _validate(config: GatewayConfig | WorkerConfig) -> None:
    try:
        config.validate()
    except ConfigError as error:
        raise flag_error(error) from error


def flag_error(error: ConfigError) -> ConfigError:
    """The same error with the leading field name turned into the flag's name."""
    field, colon, rest = str(error).partition(":")
    names = {flag.field: flag.name for flag in (*UP, *GATEWAY_ROLE, *WORKER_ROLE)}
    names["redis_url"] = "--redis"
    return ConfigError(f"{names[field]}:{rest}") if colon and field in names else error


def _fields(options: argparse.Namespace, kind: type[msgspec.Struct]) -> dict[str, Any]:
    given = vars(options)
    return {name: given[name] for name in kind.__struct_fields__ if name in given}


def _defaults() -> Mapping[str, Any]:
    gateway = msgspec.to_builtins(GatewayConfig(redis_url=""))
    worker = msgspec.to_builtins(WorkerConfig(role="prefill", worker_id="", redis_url=""))
    return {**worker, **gateway}


def _mint_worker_id(role: Role) -> str:
    # Host names may hold characters or a length that ids may not.
    host = "".join(c if c.isalnum() or c in ".-" else "-" for c in socket.gethostname())[:64]
    return f"{role}-{host}-{secrets.token_hex(4)}"
