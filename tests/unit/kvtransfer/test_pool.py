"""BlockMemory's validation, and aliases that can be cut off."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import pytest

from kvtransfer.errors import BadAddress
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.transports.address import pack_address, unpack_address


class FakeDeviceArray:
    """What a CUDA array shows of itself."""

    def __init__(self, **changes: Any) -> None:
        self.__cuda_array_interface__ = {
            "data": (0x7000_0000, False),
            "typestr": "<f2",
            "shape": (8, 16),
            "strides": None,
            "version": 3,
        } | changes


@pytest.mark.parametrize(
    "buffer",
    [
        bytes(64),
        bytearray(63),
        np.zeros((8, 16), np.uint8)[:, ::2],
        FakeDeviceArray(shape=(2,)),
        FakeDeviceArray(data=(1, True)),
        FakeDeviceArray(strides=(64, 2)),
    ],
)
def test_unusable_buffers(buffer: Any) -> None:
    with pytest.raises(ValueError, match=r"pool's|smaller"):
        BlockMemory(buffer, num_blocks=4, block_bytes=16)


@pytest.mark.parametrize(("num_blocks", "block_bytes"), [(0, 1), (1, 0), (1 << 25, 1), (-1, 4)])
def test_sizes(num_blocks: int, block_bytes: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        BlockMemory(bytearray(64), num_blocks=num_blocks, block_bytes=block_bytes)


def test_typed_buffers_are_bytes() -> None:
    array = np.arange(8, dtype=np.float32)
    memory = BlockMemory(array, num_blocks=4, block_bytes=8)
    assert bytes(memory.block(1)) == array[2:4].tobytes()
    assert memory.address == array.ctypes.data
    memory.block(0)[:] = bytes(8)
    assert array[0] == array[1] == 0


def test_device_memory_has_no_view() -> None:
    memory = BlockMemory(FakeDeviceArray(), num_blocks=4, block_bytes=64)
    assert not memory.is_host
    assert memory.map_alias() is None
    with pytest.raises(ValueError, match="host view"):
        _ = memory.buffer


@pytest.mark.skipif(sys.platform != "linux", reason="aliases need mremap")
def test_a_cut_alias_takes_no_more_bytes() -> None:
    memory = BlockMemory.allocate(3, 5000)
    alias = memory.map_alias()
    assert alias is not None
    # The kernel writes through the alias, as process_vm_writev of another process would.
    read_end, write_end = os.pipe()
    import ctypes

    def write_through_alias(data: bytes) -> int:
        os.write(write_end, data)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
        return int(libc.read(read_end, alias.address, len(data)))

    try:
        assert write_through_alias(b"hello") == 5
        assert bytes(memory.buffer[:5]) == b"hello"
        alias.cut()
        alias.cut()
        assert write_through_alias(b"later") == -1
        assert bytes(memory.buffer[:5]) == b"hello"
    finally:
        os.close(read_end)
        os.close(write_end)


def test_private_memory_has_no_alias() -> None:
    array = np.zeros(1 << 16, np.uint8)
    assert BlockMemory(array, num_blocks=1, block_bytes=1 << 16).map_alias() is None


@pytest.mark.parametrize(
    "data",
    [b"", b"\x90", b"\xff" * 10, b"x" * (65 << 10)],
)
def test_bad_addresses(data: bytes) -> None:
    with pytest.raises(BadAddress):
        unpack_address(data, transport="tcp")


def test_address_of_another_transport() -> None:
    memory = BlockMemory(bytearray(64), num_blocks=4, block_bytes=16)
    data = pack_address("tcp", memory, 0, b"")
    with pytest.raises(BadAddress, match="transport"):
        unpack_address(data, transport="ucx")
    with pytest.raises(BadAddress, match="cap"):
        pack_address("tcp", memory, 0, b"x" * (64 << 10))
