"""The GGUF header parser: good files, hostile files, random damage."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.weights.gguf_header import read_gguf_header
from engine.weights.open import open_model
from mesh.errors import ConfigError
from mesh.model_text.model_files import ModelFiles, resolve_model
from tests.unit.engine.weights.gguf_file import write_gguf

_U32, _U64, _F32, _STRING, _ARRAY = 4, 10, 6, 8, 9


def _string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _field(key: str, kind: int, value: bytes) -> bytes:
    return _string(key) + struct.pack("<I", kind) + value


def _tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    head = _string(name) + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


def _gguf(fields: list[bytes], tensors: list[bytes], *, version: int = 3) -> bytes:
    counts = struct.pack("<IQQ", version, len(tensors), len(fields))
    return b"GGUF" + counts + b"".join(fields + tensors)


@pytest.fixture
def parse(tmp_path: Path) -> Callable[[bytes], Any]:
    def run(content: bytes) -> Any:
        path = tmp_path / "header.gguf"
        path.write_bytes(content)
        return read_gguf_header(path)

    return run


def test_same_as_the_gguf_package() -> None:
    path = resolve_model("").path
    header = read_gguf_header(path)
    reader = gguf.GGUFReader(path)
    assert header.header_bytes == reader.data_offset
    assert [info.name for info in header.tensors.values()] == [t.name for t in reader.tensors]
    for theirs in reader.tensors:
        ours = header.tensors[theirs.name]
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))
        assert (ours.ggml_type, ours.offset) == (theirs.tensor_type, theirs.data_offset)
    for key, value in header.fields.items():
        content = reader.fields[key].contents()
        assert value == (tuple(content) if isinstance(content, list) else content), key
    left_out = set(reader.fields) - set(header.fields)
    assert all(key.startswith(("tokenizer.", "GGUF.")) for key in left_out)


def test_values(parse: Callable[[bytes], Any]) -> None:
    array = struct.pack("<IQ3i", 5, 3, 1, -2, 3)
    strings = struct.pack("<IQ", _STRING, 2) + _string("a") + _string("é")
    header = parse(
        _gguf(
            [
                _field("a", _F32, struct.pack("<f", 0.5)),
                _field("tokenizer.ggml.tokens", _ARRAY, strings),
                _field("b", _ARRAY, array),
                _field("c", _ARRAY, strings),
                _field("d", 7, b"\1"),
            ],
            [_tensor("t", [4, 2])],
        )
    )
    assert header.fields == {"a": 0.5, "b": (1, -2, 3), "c": ("a", "é"), "d": True}
    assert header.tensors["t"].shape == (2, 4)
    assert header.header_bytes % 32 == 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"GGML" + bytes(40),
        _gguf([], [], version=1),
        _gguf([], [], version=3 << 24),  # big-endian
        b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + bytes(64),
        _gguf([_field("k", _STRING, struct.pack("<Q", 2**64 - 1))], []),
        _gguf([_field("k", _STRING, _string(b"\xff\xff"))], []),
        _gguf([_field("k", _ARRAY, struct.pack("<IQ", _U64, 2**62))], []),
        _gguf([_field("k", _ARRAY, struct.pack("<IQ", _U64, 1 << 20))], []),
        _gguf([_field("tokenizer.k", _ARRAY, struct.pack("<IQQ", _STRING, 2, 2**60))], []),
        _gguf([_field("tokenizer.k", _ARRAY, struct.pack("<IQQ", _STRING, 2, 2**63))], []),
        _gguf([_field("k", _ARRAY, struct.pack("<IQIQ", _ARRAY, 1, _U32, 0))], []),
        _gguf([_field("k", 13, bytes(8))], []),
        _gguf([_field("k", _U32, bytes(4))] * 2, []),
        _gguf([_field("general.alignment", _U32, bytes(4))], []),
        _gguf([_field("general.alignment", _STRING, _string("32"))], []),
        _gguf([], [_tensor("t", [4])] * 2),
        _gguf([], [_tensor("t", [4], offset=1)]),
        _gguf([], [_tensor("t", [0, 4])]),
        _gguf([], [_tensor("t", [])]),
        _gguf([], [_tensor("t", [1, 1, 1, 1, 1])]),
        _gguf([], [_tensor("t", [2**32, 2**32])]),
    ],
)
def test_hostile_header(content: bytes, parse: Callable[[bytes], Any]) -> None:
    with pytest.raises(ConfigError, match="not a readable GGUF file"):
        parse(content)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read_gguf_header(tmp_path / "absent.gguf")
    with pytest.raises(ConfigError):
        read_gguf_header(tmp_path)


class TestDamage:
    """A damaged file opens and reads, or raises ConfigError; nothing else happens."""

    @pytest.fixture
    def good(self, tiny_model: Callable[..., Any], tmp_path: Path) -> tuple[bytes, int]:
        """A file's content and where its tensors begin."""
        path = tmp_path / "good.gguf"
        write_gguf(path, tiny_model("llama", num_hidden_layers=1))
        return path.read_bytes(), read_gguf_header(path).header_bytes

    def _read_all(self, folder: Path, content: bytes) -> None:
        path = folder / "damaged.gguf"
        path.write_bytes(content)
        with contextlib.suppress(ConfigError):
            _, source = open_model(ModelFiles(kind="gguf", path=path, name="tiny"))
            with source:
                for name in source.names():
                    assert tuple(source.get(name).shape) == source.shape(name)

    @settings(
        suppress_health_check=[HealthCheck.function_scoped_fixture],
        max_examples=300,
        deadline=None,
    )
    @given(data=st.data())
    def test_flipped_bytes(
        self, good: tuple[bytes, int], tmp_path: Path, data: st.DataObject
    ) -> None:
        original, header_bytes = good
        content = bytearray(original)
        places = st.integers(0, header_bytes - 1)
        for place in data.draw(st.lists(places, min_size=1, max_size=4)):
            content[place] = data.draw(st.integers(0, 255))
        self._read_all(tmp_path, bytes(content))

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    @given(data=st.data())
    def test_truncated(self, good: tuple[bytes, int], tmp_path: Path, data: st.DataObject) -> None:
        keep = data.draw(st.integers(0, len(good[0]) - 1))
        path = tmp_path / "short.gguf"
        path.write_bytes(good[0][:keep])
        with pytest.raises(ConfigError):
            open_model(ModelFiles(kind="gguf", path=path, name="tiny"))
