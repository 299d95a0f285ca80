"""Weights of a Hugging Face folder: ``model.safetensors`` or shards with an index.

Never a pickled checkpoint (``*.bin``): reading one runs code from it.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from engine.weights.file_digest import file_digest
from engine.weights.source import WeightSource
from mesh.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 << 20
_MAX_SHARDS = 4096
_DTYPES = ("F32", "F16", "BF16")
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.safetensors")


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class SafetensorsSource(WeightSource):
    """The safetensors files of one folder."""

    def __init__(self, folder: Path) -> None:
        """Open the files and read their headers.

        Raises:
            ConfigError: A file is missing, malformed, or holds another type than float32,
                float16 or bfloat16.
        """
        self._folder = folder
        self._stack = ExitStack()
        self._shards: dict[str, Any] = {}
        self._shard_of: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        try:
            for file_name, names in _files(folder).items():
                self._open(file_name, names)
        except BaseException:
            self.close()
            raise

    def names(self) -> list[str]:
        return sorted(self._shard_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def get(
        self, name: str, rows: slice = slice(None), columns: slice = slice(None)
    ) -> torch.Tensor:
        file_name = self._shard_of[name]
        if file_name not in self._shards:
            raise ConfigError(f"{self._folder} is closed")
        try:
            view = self._shards[file_name].get_slice(name)
            tensor: torch.Tensor = view[rows, columns] if len(view.get_shape()) > 1 else view[rows]
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self._folder / file_name}: {name}: {error}") from error
        return _widened(tensor)

    def content_hash(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for file_name in sorted(set(self._shard_of.values())):
            path = self._folder / file_name
            try:
                digest.update(file_name.encode() + b"\0" + file_digest(path, _header_bytes(path)))
            except OSError as error:
                raise ConfigError(f"{path} cannot be read: {error}") from error
        return digest.hexdigest()

    def close(self) -> None:
        self._shards.clear()
        self._stack.close()

    def _open(self, file_name: str, names: set[str] | None) -> None:
        path = self._folder / file_name
        try:
            shard = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            self._shards[file_name] = shard
            present = set(shard.keys())
            for name in present if names is None else names:
                if name not in present:
                    raise ConfigError(f"{path}: the index promises tensor {name!r}, not there")
                view = shard.get_slice(name)
                if view.get_dtype() not in _DTYPES:
                    raise ConfigError(f"{path}: {name}: {view.get_dtype()} is not supported")
                self._shard_of[name] = file_name
                self._shapes[name] = tuple(view.get_shape())
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to float32 out of the mapped file; numpy, for the reason ``dequantize`` gives."""
    if tensor.dtype == torch.bfloat16:
        bits = tensor.view(torch.uint16).numpy().astype(np.uint32)
        return torch.from_numpy((bits << 16).view(np.float32))
    return torch.from_numpy(tensor.numpy().astype(np.float32, order="C", copy=True))


def _files(folder: Path) -> dict[str, set[str] | None]:
    """Map each file to the tensors wanted from it; None: all."""
    index_path = folder / _INDEX
    if not index_path.is_file():
        found = sorted(path.name for path in folder.glob("*.safetensors"))
        if "model.safetensors" in found:
            found = ["model.safetensors"]
        if len(found) != 1:
            raise ConfigError(
                f"{folder} must hold model.safetensors or {_INDEX}; found {found or 'neither'}"
            )
        return {found[0]: None}
    files: dict[str, set[str] | None] = {}
    for name, file_name in _read_index(index_path).weight_map.items():
        # A plain name in the folder itself. (The file may be a link, as in the Hub's cache.)
        if not _SHARD_NAME.fullmatch(file_name):
            raise ConfigError(f"{index_path}: {name}: bad file name {file_name!r}")
        wanted = files.setdefault(file_name, set())
        assert wanted is not None
        wanted.add(name)
    if not 0 < len(files) <= _MAX_SHARDS:
        raise ConfigError(f"{index_path} names {len(files)} files")
    return files


def _read_index(path: Path) -> _Index:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_INDEX_BYTES + 1)
        if len(content) > _MAX_INDEX_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_INDEX_BYTES} bytes")
        return msgspec.json.decode(content, type=_Index)
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")
