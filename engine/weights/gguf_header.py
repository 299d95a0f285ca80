"""The header of a GGUF file: metadata and where each tensor lies.

The key/value part is ``mesh.model_text.gguf``'s; behind it follows

    num_tensors x (name string | num_dims u32 | dims u64... | ggml type u32 | offset u64)
    padding to `general.alignment` | tensor data (offsets count from here)

The vocabulary (``tokenizer.*``) is stepped over. The file is untrusted: every count and offset is
checked.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from mesh.model_text.gguf import U32, U64, GgufCursor, open_gguf

_MAX_TENSORS = 1 << 17
_MAX_NAME_BYTES = 1 << 16
_MAX_KEPT_ITEMS = 4096
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20


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
    with open_gguf(path) as cursor:
        if cursor.num_tensors > _MAX_TENSORS:
            raise ValueError(f"{cursor.num_tensors} tensors (at most {_MAX_TENSORS})")
        fields = cursor.fields(skip="tokenizer.", max_items=_MAX_KEPT_ITEMS)
        infos = [_read_tensor_info(cursor) for _ in range(cursor.num_tensors)]
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT:
            raise ValueError("general.alignment is out of range")
        start = -(-cursor.at // alignment) * alignment
        tensors: dict[str, GgufTensorInfo] = {}
        for info in infos:
            if info.name in tensors:
                raise ValueError(f"tensor {info.name!r} appears twice")
            if info.offset % alignment:
                raise ValueError(f"tensor {info.name!r} is not aligned")
            tensors[info.name] = msgspec.structs.replace(info, offset=start + info.offset)
        return GgufHeader(fields=fields, tensors=tensors, header_bytes=start)


def _read_tensor_info(cursor: GgufCursor) -> GgufTensorInfo:
    name = cursor.string(_MAX_NAME_BYTES)
    num_dims = cursor.count(U32, _MAX_DIMS, f"dimensions of {name!r}")
    dims = [cursor.number(U64) for _ in range(num_dims)]
    if not dims or min(dims) == 0 or math.prod(dims) >= 1 << 48:
        raise ValueError(f"tensor {name!r} has dimensions {dims}")
    return GgufTensorInfo(
        name=name,
        shape=tuple(reversed(dims)),
        ggml_type=cursor.number(U32),
        offset=cursor.number(U64),
    )
