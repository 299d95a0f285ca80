"""What ``Grant.address`` carries: the pool's geometry and a transport's own endpoint bytes."""

from __future__ import annotations

import msgspec

from kvtransfer.errors import BadAddress
from kvtransfer.memory.pool import MAX_BLOCKS, BlockMemory

MAX_ADDRESS_BYTES = 64 << 10
ADDRESS_VERSION = 1


class PoolAddress(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Where one sender writes. MessagePack array; made by the receiver, opaque to control code."""

    version: int = ADDRESS_VERSION
    transport: str
    base: int
    """Address of block 0 in the receiver's process; 0 where the transport does not need it."""
    num_blocks: int
    block_bytes: int
    is_host: bool
    device_id: int
    endpoint: bytes
    """NIXL agent metadata, or host, port and token of a TCP listener, or an in-process name."""


_decoder = msgspec.msgpack.Decoder(PoolAddress)


def pack_address(transport: str, memory: BlockMemory, base: int, endpoint: bytes) -> bytes:
    """Encode an address for ``memory`` mapped at ``base``.

    Raises:
        BadAddress: over the size cap.
    """
    address = PoolAddress(
        transport=transport,
        base=base,
        num_blocks=memory.num_blocks,
        block_bytes=memory.block_bytes,
        is_host=memory.is_host,
        device_id=memory.device_id,
        endpoint=endpoint,
    )
    data = msgspec.msgpack.encode(address)
    if len(data) > MAX_ADDRESS_BYTES:
        raise BadAddress(f"an address of {len(data)} bytes is over the cap")
    return data


def transport_of(data: bytes) -> str:
    """Which transport a peer's address is of.

    Raises:
        BadAddress: too large or malformed.
    """
    return _decode(data).transport


def unpack_address(data: bytes, *, transport: str) -> PoolAddress:
    """Decode a peer's address.

    Raises:
        BadAddress: too large, malformed, of another version or transport.
    """
    address = _decode(data)
    if address.version != ADDRESS_VERSION:
        raise BadAddress(f"address version {address.version}, this process has {ADDRESS_VERSION}")
    if address.transport != transport:
        raise BadAddress(f"address of transport {address.transport!r}, this one is {transport!r}")
    in_range = 0 < address.num_blocks <= MAX_BLOCKS and 0 <= address.base < 1 << 63
    in_range = in_range and 0 < address.block_bytes < 1 << 40
    if not in_range or not 0 <= address.device_id < 1024:
        raise BadAddress("an address field is out of range")
    return address


def _decode(data: bytes) -> PoolAddress:
    if len(data) > MAX_ADDRESS_BYTES:
        raise BadAddress(f"an address of {len(data)} bytes is over the cap")
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise BadAddress(f"not an address: {error}") from error
