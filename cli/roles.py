"""Runs one role in this process: ``pdmesh gateway``, ``pdmesh prefill``, ``pdmesh decode``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback

import msgspec

from cli.flags import flag_error, gateway_config, worker_config
from mesh.errors import ConfigError, PdmeshError
from mesh.local_address import WILDCARDS, address_towards
from mesh.parent_watch import die_with_parent
from mesh.worker_info import Role

PARENT_VARIABLE = "PDMESH_PARENT_PID"
"""Set by ``pdmesh up`` for its children: they die with that process."""


def run_gateway(options: argparse.Namespace) -> int:
    """Serve HTTP until SIGTERM or SIGINT."""
    _watch_parent()
    config = gateway_config(options)
    return _run("gateway.main", config)


def run_worker(role: Role, options: argparse.Namespace) -> int:
    """Serve as a prefill or decode worker until SIGTERM or SIGINT."""
    _watch_parent()
    config = worker_config(options, role)
    if config.host in WILDCARDS and not config.advertise_host:
        try:
            address = address_towards(config.redis_url)
        except ConfigError as error:
            raise flag_error(error) from error
        config = msgspec.structs.replace(config, advertise_host=address)
    return _run(f"{role}_worker.main", config)


def _watch_parent() -> None:
    # Before anything slow is imported; and not passed on to what this process may start.
    parent_pid = os.environ.pop(PARENT_VARIABLE, "")
    if parent_pid:
        die_with_parent(int(parent_pid))


def _run(module_name: str, config: object) -> int:
    try:
        # Late: the workers' modules import torch, which no other command needs.
        module = importlib.import_module(module_name)
        module.run(config)
    except ConfigError as error:
        raise flag_error(error) from error
    except PdmeshError:
        raise
    except Exception as error:
        # The last line is what `pdmesh up` shows as the cause.
        traceback.print_exc()
        print(f"error: {module_name} failed: {error}", file=sys.stderr)
        return 1
    return 0
