"""The key/value header of a GGUF file, read without touching a tensor.

Layout (little-endian; https://github.com/ggml-org/ggml/blob/master/docs/gguf.md):

    magic "GGUF" | version u32 | tensor_count u64 | kv_count u64 | kv_count x (key, type u32, value)

A string is ``length u64 | bytes``; an array is ``item type u32 | count u64 | items``. The `gguf`
package builds numpy views for every string of the vocabulary (2 s for 49k tokens); this reads the
same header in about 50 ms.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from mesh.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_KEYS = 4096
_MAX_ARRAY_ITEMS = 4 << 20
_MAX_STRING_BYTES = 16 << 20

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING = 8
_ARRAY = 9
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Return every key of the header; arrays as lists, strings decoded from UTF-8.

    Raises:
        ConfigError: the file is not a readable GGUF of version 2 or 3.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_header(data)
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"{path} is not a readable GGUF file: {error}") from error


def _read_header(data: mmap.mmap) -> dict[str, Any]:
    if data[:4] != _MAGIC:
        raise ValueError("wrong magic")
    (version,) = _U32.unpack_from(data, 4)
    if version not in _VERSIONS:
        raise ValueError(f"version {version} is not one of {_VERSIONS}")
    (num_keys,) = _U64.unpack_from(data, 16)
    if num_keys > _MAX_KEYS:
        raise ValueError(f"{num_keys} keys are over the cap")
    offset = 24
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key, offset = _read_string(data, offset)
        (kind,) = _U32.unpack_from(data, offset)
        metadata[key], offset = _read_value(data, offset + 4, kind)
    return metadata


def _read_string(data: mmap.mmap, offset: int) -> tuple[str, int]:
    (length,) = _U64.unpack_from(data, offset)
    start = offset + 8
    end = start + length
    if length > _MAX_STRING_BYTES or end > len(data):
        raise ValueError(f"string of {length} bytes at {offset}")
    return data[start:end].decode("utf-8"), end


def _read_value(data: mmap.mmap, offset: int, kind: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _read_string(data, offset)
    if kind == _ARRAY:
        return _read_array(data, offset)
    scalar = _SCALARS.get(kind)
    if scalar is None:
        raise ValueError(f"unknown value type {kind} at {offset}")
    return scalar.unpack_from(data, offset)[0], offset + scalar.size


def _read_array(data: mmap.mmap, offset: int) -> tuple[list[Any], int]:
    (kind,) = _U32.unpack_from(data, offset)
    (count,) = _U64.unpack_from(data, offset + 4)
    if count > _MAX_ARRAY_ITEMS:
        raise ValueError(f"array of {count} items at {offset}")
    offset += 12
    scalar = _SCALARS.get(kind)
    if scalar is not None:
        items = struct.unpack_from(f"<{count}{scalar.format[1:]}", data, offset)
        return list(items), offset + count * scalar.size
    values: list[Any] = []
    for _ in range(count):
        value, offset = _read_value(data, offset, kind)
        values.append(value)
    return values, offset
