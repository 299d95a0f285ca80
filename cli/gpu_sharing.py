"""How the workers of one ``pdmesh up`` divide this machine's GPUs."""

from __future__ import annotations

import os

from engine.device import choose_device
from mesh.config import WorkerConfig
from mesh.errors import ConfigError
from mesh.gpu_topology import visible
from mesh.nvml import read_topology


def gpu_slots(config: WorkerConfig, num_workers: int) -> int:
    """How many workers have to share each GPU so that all find a place; 0 without GPUs.

    Args:
        config: of any of the workers; they agree on what matters here.
        num_workers: how many there will be.

    Raises:
        ConfigError: a worker wants more GPUs than there are, or CUDA where there is none.
    """
    if config.device == "cpu":
        return 0
    topology = visible(read_topology(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if choose_device(config.device, topology) == "cpu":
        return 0
    num_gpus = len(topology.gpus)
    if config.num_gpus > num_gpus:
        raise ConfigError(
            f"device: {config.num_gpus} GPUs a worker, and there are {topology.describe()}"
        )
    # Each GPU of a worker is another one, so whole workers are dealt out.
    return -(-num_workers // (num_gpus // config.num_gpus))
