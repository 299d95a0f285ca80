"""How many KV blocks fit on a GPU beside the model, and what to change where too few do.

    0 ├──── weights ────┼─ activations ─┼────────── KV pool ──────────┤ utilization * total   total
                                                                      └ graphs, fragmentation ┘

What others use of the GPU comes off the pool. Of a GPU that several workers share each has an
equal part, and what is in use outside of a worker counts only as far as it is more than the others'
parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mesh.errors import ConfigError

_GIB = 1 << 30
_MAX_UTILIZATION = 0.98
"""No more is proposed: CUDA graphs and the allocator's gaps need the rest."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """What a GPU's memory goes to, in bytes."""

    total: int
    outside: int
    """Used by everything but this worker's tensors: other processes, CUDA's own."""
    weights: int
    activations: int
    """Most that the largest step holds beside weights and KV; 0: not measured yet."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a worker may use of a GPU."""

    utilization: float
    """Of the total, for all workers on the GPU together."""
    num_workers: int = 1


@dataclass(frozen=True, slots=True)
class KVDemand:
    """What the pool is for."""

    block_bytes: int
    block_size: int
    """Tokens."""
    max_model_len: int
    """Tokens of the longest sequence; one must fit."""
    num_staging_blocks: int = 0
    """Blocks beside the pool."""

    @property
    def min_blocks(self) -> int:
        """Blocks of one sequence of the greatest length."""
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to run the model."""

    flag: str
    """With its value, as it stands on a command line."""
    weights: int
    """Bytes on one GPU."""
    block_bytes: int


def kv_bytes(memory: GpuMemory, share: Share) -> int:
    """Bytes left for KV; negative where not even the model fits."""
    part = share.utilization * memory.total / share.num_workers
    intruding = max(0.0, memory.outside - (share.num_workers - 1) * part)
    return math.floor(part - memory.weights - memory.activations - intruding)


def fit_kv_blocks(
    memory: GpuMemory,
    demand: KVDemand,
    share: Share,
    *,
    num_blocks: int = 0,
    alternatives: Sequence[Alternative] = (),
) -> int:
    """The size of the pool in blocks, staging not counted.

    Args:
        memory: what there is, and what else it goes to.
        demand: what the pool is for.
        share: what the worker may use.
        num_blocks: a size that was asked for; 0: all that fit.
        alternatives: what to propose where the model does not fit, if it then would.

    Raises:
        ConfigError: the model, the blocks asked for, or one sequence do not fit; shows the whole
            sum and which flags would help, with their values.
    """
    left = kv_bytes(memory, share)
    fitting = left // demand.block_bytes - demand.num_staging_blocks
    wanted = num_blocks or demand.min_blocks
    if fitting >= wanted:
        return num_blocks or fitting
    need = (wanted + demand.num_staging_blocks) * demand.block_bytes
    if num_blocks:
        what, field = f"{num_blocks} KV blocks", "kv_blocks"
    else:
        what, field = f"one sequence of {demand.max_model_len} tokens", "gpu_memory_utilization"
    remedies = _remedies(memory, demand, share, wanted, alternatives)
    if num_blocks and fitting > 0:
        remedies.insert(0, f"--kv-blocks {fitting}")
    elif fitting > 0:
        remedies.insert(0, f"--max-model-len {fitting * demand.block_size}")
    raise ConfigError(
        f"{field}: {_sum(memory, share, left)}, and {what} needs {_gib(need)} "
        f"({wanted + demand.num_staging_blocks} blocks of {demand.block_bytes / 1024:.0f} KiB). "
        + (
            f"Any of these helps: {', '.join(remedies)}"
            if remedies
            else "No flag helps: it takes a GPU with more memory, more GPUs or a smaller model"
        )
    )


def _sum(memory: GpuMemory, share: Share, left: int) -> str:
    """The whole calculation in one line."""
    part = share.utilization * memory.total / share.num_workers
    divided = f" / {share.num_workers} workers" if share.num_workers > 1 else ""
    others = (share.num_workers - 1) * part
    forgiven = f" (up to {_gib(others)} of it their part)" if others else ""
    activations = _gib(memory.activations) if memory.activations else "not measured yet"
    return (
        f"{share.utilization:g} x {_gib(memory.total)} of the GPU{divided} = {_gib(part)}, "
        f"less weights {_gib(memory.weights)}, activations {activations}, "
        f"outside this worker {_gib(memory.outside)}{forgiven}: {_gib(left)} for KV"
    )


def _remedies(
    memory: GpuMemory,
    demand: KVDemand,
    share: Share,
    wanted: int,
    alternatives: Sequence[Alternative],
) -> list[str]:
    """Flags of which each alone would make ``wanted`` blocks fit."""
    found = []
    better = _least_utilization(memory, demand, share, wanted)
    if share.utilization < better <= _MAX_UTILIZATION:
        found.append(f"--gpu-memory-utilization {better:.2f}")
    if share.num_workers > 1:
        alone = replace(share, num_workers=1)
        if _fits(memory, demand, alone, wanted):
            found.append("--gpu-slots 1")
    for other in alternatives:
        changed = replace(memory, weights=other.weights)
        if _fits(changed, replace(demand, block_bytes=other.block_bytes), share, wanted):
            found.append(other.flag)
    return found


def _fits(memory: GpuMemory, demand: KVDemand, share: Share, wanted: int) -> bool:
    need = (wanted + demand.num_staging_blocks) * demand.block_bytes
    return kv_bytes(memory, share) >= need


def _least_utilization(memory: GpuMemory, demand: KVDemand, share: Share, num_blocks: int) -> float:
    """The least utilization with which these blocks fit, up to the next hundredth."""
    need = (num_blocks + demand.num_staging_blocks) * demand.block_bytes
    own = memory.weights + memory.activations + need
    # Either the others stay within their parts, or the whole is what both use together.
    least = max(own * share.num_workers, own + memory.outside) / memory.total
    return math.ceil(least * 100) / 100


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
