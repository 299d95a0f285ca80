"""The key/value header of a GGUF file, read without touching a tensor.

Layout (little-endian; https://github.com/ggml-org/ggml/blob/master/docs/gguf.md):

    magic "GGUF" | version u32 | num_tensors u64 | num_fields u64
    num_fields  x (key string | type u32 | value)
    num_tensors x …                                   read by ``engine.weights.gguf_header``

A string is ``length u64 | bytes``; an array is ``item type u32 | count u64 | items``. The `gguf`
package builds numpy views for every string of the vocabulary (2 s for 49k tokens); this reads the
same header in about 50 ms. The file is untrusted: every count and length is held against a cap and
against the file's size.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mesh.errors import ConfigError

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")

_VERSIONS = (2, 3)
_MAX_FIELDS = 4096
_MAX_KEY_BYTES = 1 << 16
_MAX_STRING_BYTES = 16 << 20
_MAX_ARRAY_ITEMS = 1 << 23
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Return every key of the header; arrays as lists, strings decoded from UTF-8.

    Raises:
        ConfigError: the file is not a readable GGUF of version 2 or 3.
    """
    with open_gguf(path) as cursor:
        fields = cursor.fields()
    return {key: list(v) if isinstance(v, tuple) else v for key, v in fields.items()}


@contextmanager
def open_gguf(path: Path) -> Iterator[GgufCursor]:
    """Map the file and check its magic and version.

    Raises:
        ConfigError: as ``read_gguf_metadata``; also for what the caller's own reading raises.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield GgufCursor(data)
    except (OSError, ValueError, OverflowError, struct.error) as error:
        raise ConfigError(f"{path} is not a readable GGUF file: {error}") from error


class GgufCursor:
    """A position in the mapped file, which it borrows.

    ``fields`` comes first; ``at`` then is where the tensor infos begin. Bad content raises
    ValueError, OverflowError or struct.error, which ``open_gguf`` turns into a ConfigError.
    """

    def __init__(self, data: mmap.mmap) -> None:
        if data[:4] != b"GGUF":
            raise ValueError("wrong magic")
        self._data = data
        self.at = 4
        version = self.number(U32)
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not supported (2 and 3 are)")
        self.num_tensors: int = self.number(U64)

    def fields(self, *, skip: str = "", max_items: int = _MAX_ARRAY_ITEMS) -> dict[str, Any]:
        """Read all key/value pairs; arrays as tuples.

        Args:
            skip: keys that begin with this are stepped over; empty: none.
            max_items: arrays with more items are stepped over.
        """
        fields: dict[str, Any] = {}
        seen: set[str] = set()
        for _ in range(self.count(U64, _MAX_FIELDS, "fields")):
            key = self.string(_MAX_KEY_BYTES)
            if key in seen:
                raise ValueError(f"field {key!r} appears twice")
            seen.add(key)
            keep = not (skip and key.startswith(skip))
            value = self._value(max_items if keep else -1)
            if keep and value is not None:
                fields[key] = value
        return fields

    def string(self, max_bytes: int) -> str:
        """Read one string of at most ``max_bytes``."""
        length = self.count(U64, max_bytes, "string bytes")
        start = self.at
        self._advance(length)
        return self._data[start : self.at].decode("utf-8")

    def count(self, number: struct.Struct, limit: int, what: str) -> int:
        """Read a number of things, at most ``limit``."""
        value: int = self.number(number)
        if value > limit:
            raise ValueError(f"{value} {what} at byte {self.at} (at most {limit})")
        return value

    def number(self, number: struct.Struct) -> Any:
        """Read one number."""
        value = number.unpack_from(self._data, self.at)[0]
        self.at += number.size
        return value

    def _value(self, max_items: int) -> Any:
        """Read one typed value; None for an array of more than ``max_items``."""
        kind = self.number(U32)
        if kind == _ARRAY:
            return self._array(max_items)
        if kind == _STRING:
            return self.string(_MAX_STRING_BYTES)
        return self.number(self._scalar(kind))

    def _array(self, max_items: int) -> tuple[Any, ...] | None:
        kind = self.number(U32)
        count = self.count(U64, _MAX_ARRAY_ITEMS, "array items")
        keep = count <= max_items
        if kind == _STRING and keep:
            return self._strings(count)
        if kind == _STRING:
            self._skip_strings(count)
            return None
        scalar = self._scalar(kind)  # an array of arrays, which no file has, is refused here
        start = self.at
        self._advance(count * scalar.size)
        if not keep:
            return None
        return struct.unpack_from(f"<{count}{scalar.format[1:]}", self._data, start)

    def _strings(self, count: int) -> tuple[str, ...]:
        # With _skip_strings the hot loop of opening a model: one turn a token and a merge.
        unpack, data, at = U64.unpack_from, self._data, self.at
        texts = []
        for _ in range(count):
            (length,) = unpack(data, at)
            if length > _MAX_STRING_BYTES:
                raise ValueError(f"string of {length} bytes at byte {at}")
            texts.append(data[at + 8 : at + 8 + length].decode("utf-8"))
            at += 8 + length
        self.at = at
        self._advance(0)
        return tuple(texts)

    def _skip_strings(self, count: int) -> None:
        unpack, data, at = U64.unpack_from, self._data, self.at
        for _ in range(count):  # past the end: struct.error, or OverflowError from 2^63 on
            at += 8 + unpack(data, at)[0]
        self.at = at
        self._advance(0)

    def _scalar(self, kind: int) -> struct.Struct:
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} is not supported at byte {self.at}")
        return _SCALARS[kind]

    def _advance(self, num_bytes: int) -> None:
        self.at += num_bytes
        if self.at > len(self._data):
            raise ValueError("the file ends inside its header")
