"""What no GGUF file has is refused by name, never followed."""

import struct
from pathlib import Path

import pytest

from mesh.errors import ConfigError
from mesh.model_text.gguf import read_gguf_metadata


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _file(path: Path, *fields: bytes) -> Path:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields)) + b"".join(fields))
    return path


def test_arrays_of_arrays_are_refused_however_deep(tmp_path: Path) -> None:
    nested = struct.pack("<IQ", 9, 1) * 5000
    path = _file(tmp_path / "nested.gguf", _string(b"key") + struct.pack("<I", 9) + nested)
    with pytest.raises(ConfigError, match="value type 9"):
        read_gguf_metadata(path)


def test_a_key_that_appears_twice_is_refused(tmp_path: Path) -> None:
    field = _string(b"key") + struct.pack("<II", 4, 1)
    with pytest.raises(ConfigError, match="appears twice"):
        read_gguf_metadata(_file(tmp_path / "twice.gguf", field, field))
