"""Decides what a worker computes on, before torch is loaded."""

from __future__ import annotations

import ast
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mesh.config import Device
from mesh.errors import ConfigError
from mesh.gpus.topology import NO_GPUS, GpuTopology
from mesh.worker_info import WorkerGpu

DeviceKind = Literal["cpu", "cuda"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """What a worker computes on."""

    device: DeviceKind
    gpus: GpuTopology = NO_GPUS
    """Its GPUs; the first is CUDA's device 0, and rank 0's."""

    def worker_gpus(self) -> tuple[WorkerGpu, ...]:
        """What peers learn of them."""
        return tuple(
            WorkerGpu(uuid=x.uuid, name=x.name, memory_bytes=x.memory_bytes, link_gb_s=links)
            for x, links in zip(self.gpus.gpus, self.gpus.link_gb_s, strict=True)
        )


ON_CPU = Placement("cpu")


def choose_device(
    asked: Device, topology: GpuTopology, why_no_cuda: Callable[[], str] | None = None
) -> DeviceKind:
    """What ``--device`` means on this machine.

    Args:
        asked: the flag.
        topology: the GPUs that this process may use.
        why_no_cuda: Why the installed packages cannot compute on a GPU; empty if they can.

    Raises:
        ConfigError: ``cuda`` is asked for and impossible; says why.
    """
    if asked == "cpu":
        return "cpu"
    if not topology.gpus:
        if asked == "cuda":
            raise ConfigError(f"device: cuda, but there is {topology.describe()}")
        _logger.debug("computing on the CPU: %s", topology.describe())
        return "cpu"
    missing = (why_no_cuda or missing_for_cuda)()
    if missing and asked == "cuda":
        raise ConfigError(f"device: cuda, but {missing}")
    if missing:
        _logger.warning("computing on the CPU beside %s: %s", topology.describe(), missing)
        return "cpu"
    return "cuda"


def cpu_level(device: DeviceKind) -> str:
    """The vector instructions of the kernels, such as ``avx2``; "" on a GPU."""
    if device != "cpu":
        return ""
    # Not at the top: torch and numba come with it.
    from engine.backends.cpu.level import LEVEL

    return str(LEVEL)


def missing_for_cuda() -> str:
    """What the installed packages lack to compute on a GPU; empty if nothing. None is loaded."""
    version = _torch_version()
    if version.get("cuda") is None:
        return f"torch {version.get('__version__', '(not installed)')} is built without CUDA"
    if importlib.util.find_spec("triton") is None:
        return "triton, which compiles the kernels, is not installed"
    return ""


def _torch_version() -> dict[str, object]:
    """The constants in torch's version file: to import torch would be to choose its GPUs."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return {}
    path = Path(spec.submodule_search_locations[0]) / "version.py"
    try:
        tree = ast.parse(path.read_text())
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[str, object] = {}
    for statement in tree.body:
        if isinstance(statement, ast.AnnAssign):
            targets: list[ast.expr] = [statement.target]
        elif isinstance(statement, ast.Assign):
            targets = statement.targets
        else:
            continue
        if isinstance(statement.value, ast.Constant):
            found |= {x.id: statement.value.value for x in targets if isinstance(x, ast.Name)}
    return found
