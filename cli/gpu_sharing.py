"""How the workers of one ``pdmesh up`` divide this machine's GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from engine.device import choose_device
from mesh.config import WorkerConfig
from mesh.errors import ConfigError
from mesh.gpus.nvml import read_topology
from mesh.gpus.topology import visible


def gpu_slots(configs: Sequence[WorkerConfig]) -> int:
    """How many workers have to share a GPU so that all find a place; 0 without GPUs.

    Workers take the GPUs with the fewest others, so no GPU gets two more than another.

    Args:
        configs: of all workers; they differ in the number of GPUs at most.

    Raises:
        ConfigError: a worker wants more GPUs than there are, or CUDA where there is none.
    """
    device = configs[0].device
    if device == "cpu":
        return 0
    topology = visible(read_topology(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if choose_device(device, topology) == "cpu":
        return 0
    most = max(config.num_gpus for config in configs)
    if most > len(topology.gpus):
        raise ConfigError(f"device: {most} GPUs a worker, and there are {topology.describe()}")
    return -(-sum(config.num_gpus for config in configs) // len(topology.gpus))
