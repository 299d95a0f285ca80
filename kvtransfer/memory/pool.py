"""The registered KV pool as the data plane sees it: equal blocks of bytes at one base address."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtransfer.memory.alias import MemoryAlias, map_alias
from kvtransfer.memory.segments import Bytes, SegmentSize
from mesh.shared_mapping import SharedMapping

MAX_BLOCKS = 1 << 24


class BlockMemory:
    """``num_blocks`` blocks of ``block_bytes`` bytes, block ``i`` at ``address + i * block_bytes``.

    Borrows ``buffer`` and keeps it alive; the caller owns it and must not resize or free it while a
    transport uses it. Prefer memory of a ``SharedMapping``: only that can be mapped by the workers
    of this host (transport ``shm``), and only shared mappings let UCX use its fastest path there
    (see ``kvtransfer.memory.alias``); any other host buffer works, about three times slower.
    """

    def __init__(
        self, buffer: Any, *, num_blocks: int, block_bytes: int,
        mapping: SharedMapping | None = None,
    ) -> None:  # fmt: skip
        """Wrap a writable contiguous buffer or an object with ``__cuda_array_interface__``.

        Args:
            buffer: The memory; kept alive.
            num_blocks: Blocks in it.
            block_bytes: Size of each.
            mapping: What the buffer is the start of, if it is a ``SharedMapping``.

        Raises:
            ValueError: sizes are not positive, or the buffer is smaller than the blocks, read-only
                or not contiguous.
        """
        if not 0 < num_blocks <= MAX_BLOCKS or block_bytes <= 0:
            raise ValueError(
                f"num_blocks={num_blocks} or block_bytes={block_bytes} is out of range"
            )
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.num_bytes = num_blocks * block_bytes
        self.device_id = 0
        self.mapping = mapping
        self._buffer = buffer
        self._view: memoryview | None = None
        cuda = getattr(buffer, "__cuda_array_interface__", None)
        if cuda is not None:
            self._wrap_device(cuda)
        else:
            self._wrap_host(buffer)

    @classmethod
    def allocate(cls, num_blocks: int, block_bytes: int) -> BlockMemory:
        """Zeroed host memory as a ``SharedMapping`` of its own."""
        mapping = SharedMapping(num_blocks * block_bytes)
        return cls(mapping.memory, num_blocks=num_blocks, block_bytes=block_bytes, mapping=mapping)

    @property
    def buffer(self) -> memoryview:
        """All blocks as bytes (host memory only)."""
        if self._view is None:
            raise ValueError("device memory has no host view")
        return self._view

    @property
    def array(self) -> Bytes:
        """All blocks as an array of bytes (host memory only)."""
        return np.frombuffer(self.buffer, np.uint8)

    @property
    def whole(self) -> SegmentSize:
        """A whole block as a segment."""
        return SegmentSize(self.block_bytes, self.block_bytes)

    @property
    def is_host(self) -> bool:
        """Whether the CPU can read the blocks (checksums are computed only then)."""
        return self._view is not None

    def block(self, block_id: int) -> memoryview:
        """One block's bytes, writable. The id must have been checked."""
        assert 0 <= block_id < self.num_blocks
        start = block_id * self.block_bytes
        return self.buffer[start : start + self.block_bytes]

    def check_block_ids(self, block_ids: Sequence[int]) -> None:
        """Validate ids of this pool.

        Raises:
            ValueError: an id is outside the pool or appears twice.
        """
        if not block_ids:
            return
        if min(block_ids) < 0 or max(block_ids) >= self.num_blocks:
            raise ValueError(f"a block id is outside the pool of {self.num_blocks} blocks")
        if len(set(block_ids)) != len(block_ids):
            raise ValueError("a block id appears twice")

    def map_alias(self) -> MemoryAlias | None:
        """A second mapping of the pool for one peer, or None where the memory can't have one."""
        if not self.is_host:
            return None
        rounded = -(-self.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return map_alias(self.address, rounded)

    def _wrap_host(self, buffer: Any) -> None:
        view = memoryview(buffer)
        if view.readonly or not view.c_contiguous:
            raise ValueError("the pool's buffer must be writable and contiguous")
        view = view.cast("B")
        if view.nbytes < self.num_bytes:
            raise ValueError(f"buffer of {view.nbytes} bytes is smaller than {self.num_bytes}")
        self._view = view[: self.num_bytes]
        self.address = int(np.frombuffer(view, dtype=np.uint8).ctypes.data)

    def _wrap_device(self, cuda: dict[str, Any]) -> None:
        address, readonly = cuda["data"]
        itemsize = np.dtype(cuda["typestr"]).itemsize
        num_bytes = int(np.prod(cuda["shape"], dtype=np.int64)) * itemsize
        if readonly or cuda.get("strides") is not None:
            raise ValueError("the pool's device array must be writable and contiguous")
        if num_bytes < self.num_bytes:
            raise ValueError(f"array of {num_bytes} bytes is smaller than {self.num_bytes}")
        self.address = int(address)
        device = getattr(self._buffer, "device", None)
        self.device_id = int(getattr(device, "index", None) or 0)
