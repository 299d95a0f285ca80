"""Reads a host's GPUs through NVML (the package nvidia-ml-py, the driver's libnvidia-ml.so.1).

Everything NVML may refuse on some driver or card (links, MIG, distance) has an answer here for
that; only a GPU without UUID or memory is left out. No CUDA context is made: a process may still
choose what CUDA is to see.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from mesh.gpus.topology import NO_COMMON_ANCESTOR, NO_GPUS, Gpu, GpuTopology

_Value = TypeVar("_Value")

_MAX_GPUS = 64
_LINK_GB_S = {1: 20, 2: 25, 3: 25, 4: 25, 5: 25, 6: 25, 7: 50, 8: 100}
"""NVML's NVLink version (1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0, 6.0) → GB/s of one link, each way."""
_USUAL_LINK_GB_S = 25

_logger = logging.getLogger(__name__)


def read_topology() -> GpuTopology:
    """All GPUs that NVML shows to this process; none, with a note, where there is no driver.

    GPUs that are divided (MIG) are left out.
    """
    try:
        import pynvml
    except ImportError as error:
        return _none(f"nvidia-ml-py is not installed: {error}")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return _none(f"NVML: {error}")
    try:
        return _read(pynvml)
    except pynvml.NVMLError as error:
        _logger.warning("NVML failed, taking it for no GPU: %s", error)
        return _none(f"NVML: {error}")
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _none(note: str) -> GpuTopology:
    return GpuTopology(NO_GPUS.gpus, NO_GPUS.link_gb_s, NO_GPUS.distance, note)


def _read(nvml: Any) -> GpuTopology:
    gpus: list[Gpu] = []
    handles: list[Any] = []
    notes: list[str] = []
    for index in range(min(nvml.nvmlDeviceGetCount(), _MAX_GPUS)):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            gpu = Gpu(
                index=index,
                uuid=nvml.nvmlDeviceGetUUID(handle),
                name=nvml.nvmlDeviceGetName(handle),
                memory_bytes=memory.total,
                used_bytes=memory.used,
            )
        except nvml.NVMLError as error:
            notes.append(f"GPU {index}: {error}")
            continue
        mig_mode, _ = _or(nvml, (0, 0), nvml.nvmlDeviceGetMigMode, handle)
        if mig_mode:
            notes.append(f"GPU {index} is divided (MIG)")
            continue
        gpus.append(gpu)
        handles.append(handle)
    for note in notes:
        _logger.warning("left out: %s", note)
    return GpuTopology(
        gpus=tuple(gpus),
        link_gb_s=_links(nvml, handles),
        distance=_distances(nvml, handles),
        note="; ".join(notes),
    )


def _distances(nvml: Any, handles: list[Any]) -> tuple[tuple[int, ...], ...]:
    ancestor = nvml.nvmlDeviceGetTopologyCommonAncestor
    return tuple(
        tuple(0 if a is b else _or(nvml, NO_COMMON_ANCESTOR, ancestor, a, b) for b in handles)
        for a in handles
    )


def _links(nvml: Any, handles: list[Any]) -> tuple[tuple[int, ...], ...]:
    """GB/s between each two GPUs: their own links, and the weaker one's links to switches."""
    size = len(handles)
    place = {_bus_id(nvml.nvmlDeviceGetPciInfo(handle)): i for i, handle in enumerate(handles)}
    direct = [[0] * size for _ in range(size)]
    switched = [0] * size
    for i, handle in enumerate(handles):
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            if not _or(nvml, 0, nvml.nvmlDeviceGetNvLinkState, handle, link):
                continue
            version = _or(nvml, 0, nvml.nvmlDeviceGetNvLinkVersion, handle, link)
            bandwidth = _LINK_GB_S.get(version, _USUAL_LINK_GB_S)
            remote = _or(nvml, None, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
            j = None if remote is None else place.get(_bus_id(remote))
            if j is not None:
                direct[i][j] += bandwidth
            elif _is_switch(nvml, handle, link):
                switched[i] += bandwidth
    return tuple(
        tuple(
            0 if i == j else max(direct[i][j], min(switched[i], switched[j])) for j in range(size)
        )
        for i in range(size)
    )


def _is_switch(nvml: Any, handle: Any, link: int) -> bool:
    unknown = nvml.NVML_NVLINK_DEVICE_TYPE_UNKNOWN
    kind = _or(nvml, unknown, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
    # In a virtual machine the switches belong to the host and nothing is said about them.
    return kind in (nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH, unknown)


def _bus_id(pci: Any) -> str:
    bus_id = pci.busId
    return (bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)).upper()


def _or(nvml: Any, otherwise: _Value, ask: Callable[..., _Value], *arguments: Any) -> _Value:
    """What NVML answers, or ``otherwise`` where it cannot on this card or driver."""
    try:
        return ask(*arguments)
    except nvml.NVMLError:
        return otherwise
