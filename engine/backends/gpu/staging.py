"""A step's small arrays on their way to the device: one asynchronous copy, into a fixed place.

Two host buffers take turns: while the device may still copy from one, the next step fills the
other. The device has one buffer, since its copies and kernels run in order; captured graphs read
from it at offsets that depend on the sections' sizes alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.backends.gpu.device import Device, Event

ALIGNMENT = 128
"""Of every section: kernels are compiled for aligned pointers."""

_TORCH_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


def section_bytes(size: int, dtype: npt.DTypeLike) -> int:
    """Bytes of one array with its padding."""
    return -(-size * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT


class Staging:
    """Owns the buffers of one group of arrays."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        """Args: num_bytes: all sections of the largest step, see ``section_bytes``."""
        self._device = device
        self._on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device.torch_device)
        self._host = [device.pinned(num_bytes) for _ in range(2)]
        self._copied: list[Event | None] = [None, None]
        self._turn = 0

    def stage(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, torch.Tensor]:
        """Begin to copy; returns the arrays on the device, valid until the next call's copy.

        The views lie at the same addresses whenever the sizes are the same.
        """
        turn, self._turn = self._turn, 1 - self._turn
        copied = self._copied[turn]
        if copied is not None:
            copied.wait()
        buffer = self._host[turn].numpy()
        offset = 0
        for array in arrays.values():
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            buffer[offset : offset + len(flat)] = flat
            offset += section_bytes(array.size, array.dtype)
        assert offset <= len(buffer), "a step larger than its engine's limits"
        self._on_device[:offset].copy_(self._host[turn][:offset], non_blocking=True)
        self._copied[turn] = self._device.record()
        return self._views([(name, array.shape, array.dtype) for name, array in arrays.items()])

    def _views(
        self, sections: Sequence[tuple[str, tuple[int, ...], np.dtype[np.generic]]]
    ) -> dict[str, torch.Tensor]:
        views = {}
        offset = 0
        for name, shape, dtype in sections:
            size = int(np.prod(shape))
            section = self._on_device[offset : offset + size * dtype.itemsize]
            views[name] = section.view(_TORCH_DTYPES[dtype]).view(shape)
            offset += section_bytes(size, dtype)
        return views
