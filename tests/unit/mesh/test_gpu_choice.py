"""Which GPUs a worker gets, on hosts of the kinds there are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh.errors import ConfigError
from mesh.gpus.choice import choose_gpus
from mesh.gpus.topology import GpuTopology, visible
from tests.unit.mesh.gpu_hosts import bridged_a100, dgx_h100, dgx_v100, host, unlinked


def choose(topology: GpuTopology, free: str | dict[int, int], count: int) -> list[int]:
    """Places of the GPUs chosen; ``free`` lists places, or says how many share each."""
    sharers = free if isinstance(free, dict) else {int(i): 0 for i in free}
    uuids = [gpu.uuid for gpu in topology.gpus]
    chosen = choose_gpus(topology, {uuids[i]: n for i, n in sharers.items()}, count)
    return [uuids.index(uuid) for uuid in chosen]


def test_where_all_are_linked_the_first_of_one_socket_are_taken() -> None:
    assert choose(dgx_h100(), "01234567", 2) == [0, 1]
    assert choose(dgx_h100(), "01234567", 4) == [0, 1, 2, 3]
    assert choose(dgx_h100(), "01234567", 8) == list(range(8))
    # 3 is alone on its CPU: four of the other one.
    assert choose(dgx_h100(), "34567", 4) == [4, 5, 6, 7]


def test_a_pair_is_one_with_a_bridge() -> None:
    assert choose(bridged_a100(), "0123", 2) == [0, 2]
    assert choose(bridged_a100(), "123", 2) == [1, 3]
    assert choose(bridged_a100(), "01", 2) == [0, 1], "no bridge is left: the nearest two"
    assert choose(bridged_a100(), "0123", 4) == [0, 1, 2, 3]


def test_a_lone_gpu_is_taken_from_no_pair() -> None:
    assert choose(bridged_a100(), "0123", 1) == [0]
    assert choose(bridged_a100(), "013", 1) == [0], "2 is gone, so 0 has lost its pair"
    assert choose(bridged_a100(), "023", 1) == [3]


def test_the_cube_mesh_gives_its_best_linked_four() -> None:
    four = choose(dgx_v100(), "01234567", 4)
    assert four == [0, 1, 2, 3], "the links of a half: 3 double, 3 single"
    assert choose(dgx_v100(), "01234567", 2) == [0, 3]
    assert choose(dgx_v100(), "1245", 2) == [1, 2]


def test_without_links_the_nearest_are_taken() -> None:
    assert choose(unlinked(), "0123", 2) == [0, 1]
    assert choose(unlinked(), "123", 2) == [2, 3]


def test_too_few_free_is_none() -> None:
    assert choose(unlinked(), "0", 2) == []
    assert choose(unlinked(), "", 1) == []


def test_shared_gpus_fill_evenly() -> None:
    assert choose(dgx_h100(), {0: 1, 1: 0, 2: 1}, 1) == [1]
    assert choose(dgx_h100(), {0: 1, 1: 1}, 1) == [0]


def test_a_gpu_in_use_by_a_stranger_is_the_last() -> None:
    topology = unlinked()
    busy = replace(topology.gpus[0], used_bytes=10 << 30)
    topology = replace(topology, gpus=(busy, *topology.gpus[1:]))
    assert choose(topology, "0123", 1) == [1]
    assert choose(topology, "0123", 2) == [2, 3]
    assert choose(topology, "0", 1) == [0]
    assert choose(topology, {0: 1, 1: 1}, 1) == [0], "a co-tenant's memory is no stranger's"


def test_the_ranks_of_a_worker_are_of_one_kind() -> None:
    topology = dgx_h100()
    other = replace(topology.gpus[1], name="NVIDIA H200")
    topology = replace(topology, gpus=(topology.gpus[0], other, *topology.gpus[2:]))
    assert choose(topology, "012", 2) == [0, 2]


def test_a_host_of_sixteen_is_decided_at_once() -> None:
    pairs = [(i, j, 300) for i in range(16) for j in range(i)]
    topology = host(16, pairs)
    free = {i: 0 for i in range(16)}
    assert choose(topology, free, 8) == list(range(8))


def test_a_topology_says_what_it_is() -> None:
    assert dgx_h100().describe() == (
        "8 x NVIDIA H100 80GB HBM3 80 GiB, NVLink 450 GB/s between all pairs"
    )
    assert bridged_a100().describe().endswith("NVLink 300 GB/s between 2 of 6 pairs")
    assert dgx_v100().describe().endswith("NVLink 25 to 50 GB/s between 16 of 28 pairs")
    assert unlinked().describe() == "4 x NVIDIA L40S 48 GiB, no NVLink"
    one = dgx_h100().subset([dgx_h100().gpus[3].uuid])
    assert one.describe() == "1 x NVIDIA H100 80GB HBM3 80 GiB"


def test_a_subset_keeps_its_links_in_its_order() -> None:
    topology = bridged_a100()
    uuids = [topology.gpus[i].uuid for i in (3, 0, 1)]
    part = topology.subset(uuids)
    assert [gpu.index for gpu in part.gpus] == [3, 0, 1]
    assert part.link_gb_s == ((0, 0, 300), (0, 0, 0), (300, 0, 0))
    assert part.distance == ((0, 50, 50), (50, 0, 30), (50, 30, 0))
    with pytest.raises(ValueError, match="not 1 x 1"):
        GpuTopology(topology.gpus[:1], (), ())


@pytest.mark.parametrize(
    ("value", "left"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        ("GPU-00000003", [3]),
        ("GPU-00000003-0000-0000-0000-000000000000, 1", [3, 1]),
        ("1,9,2", [1]),
        ("1,1", [1]),
        ("GPU-0000", []),
        ("-1", []),
        ("", []),
    ],
)
def test_cuda_visible_devices_restricts(value: str | None, left: list[int]) -> None:
    topology = visible(unlinked(), value)
    assert [gpu.index for gpu in topology.gpus] == left
    assert len(left) == 4 or topology.note == f"CUDA_VISIBLE_DEVICES leaves {len(left)} of 4"


def test_a_part_of_a_gpu_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="MIG-1234: MIG is not supported"):
        visible(unlinked(), "MIG-1234")
