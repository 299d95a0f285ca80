"""What a pool on a GPU rules out: everything that reads or maps its bytes on the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtransfer.data_plane import open_data_plane
from kvtransfer.errors import TransportError
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.transports.auto import AutoTransport
from kvtransfer.transports.socket.shm import ShmTransport
from kvtransfer.transports.socket.tcp import TcpTransport
from kvtransfer.transports.ucx.library import MODULES
from mesh.config import WorkerConfig
from mesh.errors import ConfigError

NUM_BLOCKS, BLOCK_BYTES = 4, 2 * 2 * 16 * 8
GEOMETRY: Any = SimpleNamespace(
    num_blocks=NUM_BLOCKS, num_layers=1, num_kv_heads=2, block_size=16, row_bytes=8, dtype="bf16"
)


class DeviceArray:
    """What a CUDA tensor shows of itself."""

    def __init__(self) -> None:
        self.__cuda_array_interface__ = {
            "data": (0x7000_0000, False),
            "typestr": "|u1",
            "shape": (NUM_BLOCKS + 64, BLOCK_BYTES),
            "strides": None,
            "version": 3,
        }


def test_kv_can_not_be_compressed_on_its_way() -> None:
    config = WorkerConfig(
        role="prefill", worker_id="p", redis_url="redis://h", kv_wire="int8", transport="ucx"
    )
    with pytest.raises(ConfigError, match=r"^kv_wire: int8 compresses KV"):
        open_data_plane(config, GEOMETRY, DeviceArray(), None, 1)


@pytest.mark.parametrize("transport", [ShmTransport, TcpTransport])
def test_transports_that_read_on_the_host_refuse(transport: Any) -> None:
    memory = BlockMemory(DeviceArray(), num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES)
    with pytest.raises(TransportError, match="host memory"):
        transport(memory)


@pytest.mark.parametrize("has_nixl", [True, False])
def test_only_ucx_is_offered(has_nixl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> object | None:
        return object() if has_nixl and name == MODULES[0] else None

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    memory = BlockMemory(DeviceArray(), num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES)
    arguments: dict[str, Any] = {"worker_id": "w", "epoch": 1, "host": "h", "advertise_host": ""}
    if not has_nixl:
        with pytest.raises(TransportError, match="it needs NIXL"):
            AutoTransport(memory, **arguments)
        return
    transport = AutoTransport(memory, **arguments)
    assert transport.names == ("ucx",)
    transport.close()
