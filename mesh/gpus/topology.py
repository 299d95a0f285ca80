"""Which GPUs a host has and how they are linked; plain data, filled by ``mesh.gpus.nvml``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mesh.errors import ConfigError

_GIB = 1 << 30
NO_COMMON_ANCESTOR = 50
"""NVML's largest distance: two GPUs of different CPU sockets."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as NVML shows it."""

    index: int
    """NVML's, in PCI order; not CUDA's."""
    uuid: str
    """``GPU-…``: the same for every process and container of the host, and after a reboot."""
    name: str
    memory_bytes: int
    """Total, what the driver keeps for itself included."""
    used_bytes: int = 0
    """In use when the topology was read, by anybody."""


@dataclass(frozen=True, slots=True)
class GpuTopology:
    """GPUs and what lies between each two of them.

    Raises:
        ValueError: a matrix is not ``len(gpus)`` square.
    """

    gpus: tuple[Gpu, ...]
    link_gb_s: tuple[tuple[int, ...], ...]
    """[i][j]: NVLink bandwidth from i to j in GB/s, each direction; 0: none. Through switches it is
    what the weaker end has."""
    distance: tuple[tuple[int, ...], ...]
    """[i][j]: NVML's level of the common ancestor: 0 one board, 10 one PCIe switch, 20 several, 30
    one host bridge, 40 one NUMA node, 50 none."""
    note: str = ""
    """Why GPUs are missing here, where that is known."""

    def __post_init__(self) -> None:
        size = len(self.gpus)
        for matrix in (self.link_gb_s, self.distance):
            if len(matrix) != size or any(len(row) != size for row in matrix):
                raise ValueError(f"a matrix of {size} GPUs is not {size} x {size}")

    def subset(self, uuids: Sequence[str]) -> GpuTopology:
        """These GPUs alone, in this order.

        Raises:
            KeyError: one is not here.
        """
        place = {gpu.uuid: i for i, gpu in enumerate(self.gpus)}
        rows = [place[uuid] for uuid in uuids]
        return GpuTopology(
            gpus=tuple(self.gpus[i] for i in rows),
            link_gb_s=tuple(tuple(self.link_gb_s[i][j] for j in rows) for i in rows),
            distance=tuple(tuple(self.distance[i][j] for j in rows) for i in rows),
            note=self.note,
        )

    def describe(self) -> str:
        """One line for people: what the GPUs are and how they are linked."""
        if not self.gpus:
            return f"no GPU ({self.note})" if self.note else "no GPU"
        names = sorted({f"{gpu.name} {gpu.memory_bytes / _GIB:.0f} GiB" for gpu in self.gpus})
        text = f"{len(self.gpus)} x {' / '.join(names)}"
        if len(self.gpus) == 1:
            return text
        pairs = [self.link_gb_s[i][j] for i in range(len(self.gpus)) for j in range(i)]
        linked = [bandwidth for bandwidth in pairs if bandwidth]
        if not linked:
            return f"{text}, no NVLink"
        speeds = f"{min(linked)}" + ("" if min(linked) == max(linked) else f" to {max(linked)}")
        which = "all pairs" if len(linked) == len(pairs) else f"{len(linked)} of {len(pairs)} pairs"
        return f"{text}, NVLink {speeds} GB/s between {which}"


NO_GPUS = GpuTopology(gpus=(), link_gb_s=(), distance=())


def visible(topology: GpuTopology, cuda_visible_devices: str | None) -> GpuTopology:
    """What ``CUDA_VISIBLE_DEVICES`` leaves of a topology, in its order.

    Numbers are taken in PCI order (CUDA does so where all GPUs are alike, or with
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID``); UUIDs may be shortened. As in CUDA, a wrong entry hides
    itself and all after it.

    Args:
        topology: everything NVML sees.
        cuda_visible_devices: the variable's value; None: it is not set.

    Raises:
        ConfigError: it names a part of a GPU (MIG), which cannot be leased.
    """
    if cuda_visible_devices is None:
        return topology
    chosen: list[str] = []
    for entry in (part.strip() for part in cuda_visible_devices.split(",")):
        if entry.upper().startswith("MIG"):
            raise ConfigError(f"device: CUDA_VISIBLE_DEVICES names {entry}: MIG is not supported")
        found = [gpu.uuid for gpu in topology.gpus if _is_named(gpu, entry)]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    if len(chosen) == len(topology.gpus):
        return topology.subset(chosen)
    note = f"CUDA_VISIBLE_DEVICES leaves {len(chosen)} of {len(topology.gpus)}"
    left = topology.subset(chosen)
    return GpuTopology(left.gpus, left.link_gb_s, left.distance, note)


def _is_named(gpu: Gpu, entry: str) -> bool:
    if entry.isdecimal():
        return gpu.index == int(entry)
    return entry.startswith("GPU-") and len(entry) > len("GPU-") and gpu.uuid.startswith(entry)
