"""Which of the free GPUs a worker should take."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from mesh.gpus.topology import Gpu, GpuTopology

_BUSY_SHARE = 0.05
"""A GPU with more of its memory in use than this, and no lease, computes for a stranger."""
_MAX_CANDIDATES = 20
"""C(20, 10) is under 200,000 sets; hosts have 16 GPUs at most."""


def is_busy(gpu: Gpu) -> bool:
    """Whether somebody computes there."""
    return gpu.used_bytes > _BUSY_SHARE * gpu.memory_bytes


def choose_gpus(
    topology: GpuTopology, num_holders: Mapping[str, int], count: int
) -> tuple[str, ...]:
    """The best ``count`` GPUs for one worker.

    Best is, in this order: of one kind; not in use by strangers; shared with the fewest workers;
    most NVLink bandwidth among them; nearest on PCIe; fewest links lost to the GPUs left free (a
    lone GPU is taken from no pair); first in PCI order.

    Args:
        topology: the host's.
        num_holders: of every GPU that may be taken, how many workers share it already.
        count: how many are wanted, at least 1.

    Returns:
        Their UUIDs in PCI order; empty when there are not that many.
    """
    free = [i for i, gpu in enumerate(topology.gpus) if gpu.uuid in num_holders]
    free.sort(key=lambda i: topology.gpus[i].index)
    free = free[:_MAX_CANDIDATES]
    if count > len(free):
        return ()

    def merit(chosen: tuple[int, ...]) -> tuple[int, ...]:
        gpus = [topology.gpus[i] for i in chosen]
        pairs = list(combinations(chosen, 2))
        left = [i for i in free if i not in chosen]
        return (
            -len({gpu.name for gpu in gpus}),
            -sum(not num_holders[gpu.uuid] and is_busy(gpu) for gpu in gpus),
            -sum(num_holders[gpu.uuid] for gpu in gpus),
            sum(topology.link_gb_s[i][j] for i, j in pairs),
            -sum(topology.distance[i][j] for i, j in pairs),
            -sum(topology.link_gb_s[i][j] for i in chosen for j in left),
        )

    # Of equals, max() keeps the first, and combinations come in PCI order.
    best = max(combinations(free, count), key=merit)
    return tuple(topology.gpus[i].uuid for i in best)
