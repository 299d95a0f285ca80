"""Hosts of the kinds there are, as NVML shows them."""

from __future__ import annotations

from collections.abc import Iterable

from mesh.gpus.topology import Gpu, GpuTopology

_GIB = 1 << 30


def host(
    size: int,
    links: Iterable[tuple[int, int, int]] = (),
    *,
    name: str = "NVIDIA A100 80GB PCIe",
    memory_gib: int = 80,
    socket: int = 0,
) -> GpuTopology:
    """A host of ``size`` equal GPUs; ``links`` are (i, j, GB/s), ``socket`` the GPUs of a CPU."""
    socket = socket or size
    matrix = [[0] * size for _ in range(size)]
    for i, j, bandwidth in links:
        matrix[i][j] = matrix[j][i] = bandwidth
    return GpuTopology(
        gpus=tuple(
            Gpu(i, f"GPU-{i:08x}-0000-0000-0000-000000000000", name, memory_gib * _GIB)
            for i in range(size)
        ),
        link_gb_s=tuple(map(tuple, matrix)),
        distance=tuple(
            tuple(0 if i == j else 30 if i // socket == j // socket else 50 for j in range(size))
            for i in range(size)
        ),
    )


def dgx_h100() -> GpuTopology:
    """Eight GPUs, each with 18 NVLink 4 links to the switches: 450 GB/s between any two."""
    pairs = [(i, j, 18 * 25) for i in range(8) for j in range(i)]
    return host(8, pairs, name="NVIDIA H100 80GB HBM3", socket=4)


def bridged_a100() -> GpuTopology:
    """Four PCIe cards; bridges of 12 NVLink 3 links join 0 with 2 and 1 with 3."""
    return host(4, [(0, 2, 300), (1, 3, 300)], socket=2)


def dgx_v100() -> GpuTopology:
    """The hybrid cube mesh of eight V100: some pairs have two links, some one, some none."""
    double = [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)]
    single = [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)]
    links = [(i, j, 50) for i, j in double] + [(i, j, 25) for i, j in single]
    return host(8, links, name="Tesla V100-SXM2-32GB", memory_gib=32, socket=4)


def unlinked() -> GpuTopology:
    """Four PCIe cards without bridges, two on each CPU."""
    return host(4, name="NVIDIA L40S", memory_gib=48, socket=2)
