"""The header of a GGUF file: metadata and where each tensor lies.

    magic "GGUF" | version u32 | num_tensors u64 | num_fields u64
    num_fields  x (key string | type u32 | value)
    num_tensors x (name string | num_dims u32 | dims u64... | ggml type u32 | offset u64)
    padding to `general.alignment` | tensor data (offsets count from here)

Little-endian; a string is a u64 length and its bytes; an array is item type u32, count u64, items
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). ``gguf.GGUFReader`` makes a numpy view
for each of a vocabulary's strings, seconds of work for a header; this one steps over
``tokenizer.*``. The file is untrusted: every count and offset is checked against the file's size.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import msgspec

from mesh.errors import ConfigError

_MAX_FIELDS = 4096
_MAX_TENSORS = 1 << 17
_MAX_STRING_BYTES = 16 << 20
_MAX_NAME_BYTES = 1 << 16
_MAX_ARRAY_ITEMS = 1 << 23
_MAX_KEPT_ITEMS = 4096
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
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
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}


class GgufTensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the file."""

    name: str
    """GGUF name, such as ``blk.0.attn_q.weight``."""
    shape: tuple[int, ...]
    """Row-major, outermost first: the reverse of the file's order."""
    ggml_type: int
    """Number of the storage type (``gguf.GGMLQuantizationType``)."""
    offset: int
    """First byte, from the start of the file."""


class GgufHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Everything before the tensor data."""

    fields: dict[str, Any]
    """Metadata by key, without ``tokenizer.*``; arrays as tuples, those of more than 4096 items
    left out."""
    tensors: dict[str, GgufTensorInfo]
    """Tensors by name."""
    header_bytes: int
    """Where the tensor data begins."""


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse the header of ``path``.

    Raises:
        ConfigError: The file cannot be read or is not a well-formed GGUF of version 2 or 3.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(data).header()
    except (OSError, ValueError, OverflowError, struct.error) as error:
        raise ConfigError(f"{path} is not a readable GGUF file: {error}") from error


class _Parser:
    """A position in the mapped file. Raises ValueError or struct.error on bad content."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self) -> GgufHeader:
        if self._data[:4] != b"GGUF":
            raise ValueError("wrong magic")
        self._at = 4
        version = self._number(_U32)
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported (2 and 3 are)")
        num_tensors = self._count(_U64, _MAX_TENSORS, "tensors")
        num_fields = self._count(_U64, _MAX_FIELDS, "fields")
        fields: dict[str, Any] = {}
        seen: set[str] = set()
        for _ in range(num_fields):
            key = self._string(_MAX_NAME_BYTES)
            if key in seen:
                raise ValueError(f"field {key!r} appears twice")
            seen.add(key)
            value = self._value(keep=not key.startswith("tokenizer."))
            if value is not None:
                fields[key] = value
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT:
            raise ValueError("general.alignment is out of range")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensorInfo] = {}
        for info in infos:
            if info.name in tensors:
                raise ValueError(f"tensor {info.name!r} appears twice")
            if info.offset % alignment:
                raise ValueError(f"tensor {info.name!r} is not aligned")
            tensors[info.name] = msgspec.structs.replace(info, offset=start + info.offset)
        return GgufHeader(fields=fields, tensors=tensors, header_bytes=start)

    def _tensor_info(self) -> GgufTensorInfo:
        name = self._string(_MAX_NAME_BYTES)
        num_dims = self._count(_U32, _MAX_DIMS, f"dimensions of {name!r}")
        dims = [self._number(_U64) for _ in range(num_dims)]
        if not dims or min(dims) == 0 or math.prod(dims) >= 1 << 48:
            raise ValueError(f"tensor {name!r} has dimensions {dims}")
        return GgufTensorInfo(
            name=name,
            shape=tuple(reversed(dims)),
            ggml_type=self._number(_U32),
            offset=self._number(_U64),
        )

    def _value(self, *, keep: bool) -> Any:
        """Read one typed value; return None for what is stepped over."""
        kind = self._number(_U32)
        if kind == _ARRAY:
            return self._array(keep=keep)
        if kind == _STRING:
            text = self._string(_MAX_STRING_BYTES)
            return text if keep else None
        return self._number(self._scalar(kind))

    def _array(self, *, keep: bool) -> tuple[Any, ...] | None:
        kind = self._number(_U32)
        count = self._count(_U64, _MAX_ARRAY_ITEMS, "array items")
        keep = keep and count <= _MAX_KEPT_ITEMS
        if kind == _STRING:
            if keep:
                return tuple(self._string(_MAX_STRING_BYTES) for _ in range(count))
            self._skip_strings(count)
            return None
        scalar = self._scalar(kind)  # an array of arrays, which no file has, is refused here
        start = self._at
        self._advance(count * scalar.size)
        if not keep:
            return None
        return struct.unpack_from(f"<{count}{scalar.format[1:]}", self._data, start)

    def _skip_strings(self, count: int) -> None:
        # The hot loop of opening a model: one turn for each token and each merge of the vocabulary.
        unpack, data, at = _U64.unpack_from, self._data, self._at
        for _ in range(count):  # past the end: struct.error, or OverflowError from 2^63 on
            at += 8 + unpack(data, at)[0]
        self._at = at
        self._advance(0)

    def _scalar(self, kind: int) -> struct.Struct:
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} is not supported at byte {self._at}")
        return _SCALARS[kind]

    def _string(self, max_bytes: int) -> str:
        length = self._count(_U64, max_bytes, "string bytes")
        start = self._at
        self._advance(length)
        return self._data[start : self._at].decode("utf-8")

    def _count(self, number: struct.Struct, limit: int, what: str) -> int:
        value: int = self._number(number)
        if value > limit:
            raise ValueError(f"{value} {what} at byte {self._at} (at most {limit})")
        return value

    def _number(self, number: struct.Struct) -> Any:
        value = number.unpack_from(self._data, self._at)[0]
        self._at += number.size
        return value

    def _advance(self, num_bytes: int) -> None:
        self._at += num_bytes
        if self._at > len(self._data):
            raise ValueError("the file ends inside its header")
