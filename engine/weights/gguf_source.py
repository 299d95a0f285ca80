"""Weights of a GGUF file, decoded one tensor at a time.

Two transformations of llama.cpp's converter are undone here:

- Rows of q and k of the ``llama`` architecture are stored for its interleaved rotation, pairs
  ``(2i, 2i + 1)`` within a head; Hugging Face pairs ``(i, i + head_dim / 2)``. (Qwen and Gemma
  are stored as they are.)
- Gemma 3's norm weights are stored as ``1 + weight``; Hugging Face stores ``weight``. The sum was
  rounded to float32 when the file was made, so the difference is exact to 6e-8 of 1.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec
import numpy as np
import torch

from engine.model_config import ModelConfig
from engine.weights.dequantize import covering_blocks, dequantize, storage_bytes
from engine.weights.file_digest import file_digest
from engine.weights.gguf_config import config_from_gguf
from engine.weights.gguf_header import GgufHeader, GgufTensorInfo, read_gguf_header
from engine.weights.gguf_names import ROPE_FACTORS, hf_expert_names, hf_name
from engine.weights.source import WeightSource
from mesh.errors import ConfigError


class _Stored(msgspec.Struct, frozen=True):
    """Where one Hugging Face tensor lies."""

    info: GgufTensorInfo
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GgufSource(WeightSource):
    """One GGUF file; ``config`` is what its metadata says.

    Reads with ``pread``: a file cut short while open is an error, never a SIGBUS.
    """

    def __init__(self, path: Path) -> None:
        """Open ``path`` and read its header.

        Raises:
            ConfigError: The file is unreadable, malformed or not a supported model.
        """
        self._path = path
        self._header = read_gguf_header(path)
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._size = os.fstat(self._fd).st_size
            self.config = self._read_config(self._header)
            self._stored = self._locate(self._header)
        except OSError as error:
            self.close()
            raise ConfigError(f"{path} cannot be read: {error}") from error
        except BaseException:
            self.close()
            raise

    def names(self) -> list[str]:
        return sorted(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def get(
        self, name: str, rows: slice = slice(None), columns: slice = slice(None)
    ) -> torch.Tensor:
        stored = self._stored[name]
        weight = self._read_part(stored, rows, columns)
        if self.config.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            return _half_rotated(weight, self.config.head_dim)
        if self.config.norm_plus_one and name.endswith("norm.weight"):
            return weight - 1
        return weight

    def content_hash(self) -> str:
        try:
            return file_digest(self._path, self._header.header_bytes).hex()
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be read: {error}") from error

    def bits_per_weight(self) -> float:
        of_layers = [
            stored
            for name, stored in self._stored.items()
            if ".layers." in name and len(stored.shape) > 1
        ]
        num_bits = 8 * sum(stored.num_bytes for stored in of_layers)
        return num_bits / max(1, sum(math.prod(stored.shape) for stored in of_layers))

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _read_config(self, header: GgufHeader) -> ModelConfig:
        factors: list[float] = []
        if (info := header.tensors.get(ROPE_FACTORS)) is not None:
            if math.prod(info.shape) > 1 << 12:
                raise ConfigError(f"{self._path}: {ROPE_FACTORS} has shape {list(info.shape)}")
            raw = self._read(info.name, info.offset, self._checked_bytes(info))
            factors = dequantize(raw, info.ggml_type, info.shape).flatten().tolist()
        shapes = {name: info.shape for name, info in header.tensors.items()}
        return config_from_gguf(header.fields, tensor_shapes=shapes, rope_factors=factors)

    def _locate(self, header: GgufHeader) -> dict[str, _Stored]:
        stored: dict[str, _Stored] = {}
        num_experts = self.config.num_experts
        for info in header.tensors.values():
            num_bytes = self._checked_bytes(info)
            if info.name == ROPE_FACTORS:
                continue
            name = hf_name(info.name, self.config.architecture)
            if name is not None:
                stored[name] = _Stored(info, info.shape, info.offset, num_bytes)
                continue
            experts = hf_expert_names(info.name, num_experts)
            if not experts or len(info.shape) != 3 or info.shape[0] != num_experts:
                raise ConfigError(
                    f"{self._path}: tensor {info.name!r} of shape {list(info.shape)} "
                    f"has no place in a {self.config.architecture} model"
                )
            step = num_bytes // num_experts
            for i, expert in enumerate(experts):
                stored[expert] = _Stored(info, info.shape[1:], info.offset + i * step, step)
        return stored

    def _checked_bytes(self, info: GgufTensorInfo) -> int:
        try:
            num_bytes = storage_bytes(info.ggml_type, info.shape)
        except ConfigError as error:
            raise ConfigError(f"{self._path}: tensor {info.name!r}: {error}") from error
        if info.offset + num_bytes > self._size:
            raise ConfigError(f"{self._path}: tensor {info.name!r} lies outside the file")
        return num_bytes

    def _read_part(self, stored: _Stored, rows: slice, columns: slice) -> torch.Tensor:
        """Read whole rows, decode the blocks of them that hold the columns."""
        info, shape = stored.info, stored.shape
        if len(shape) != 2:
            raw = self._read(info.name, stored.offset, stored.num_bytes)
            return dequantize(raw, info.ggml_type, shape)[rows].clone()
        row_bytes = stored.num_bytes // shape[0]
        first, last, _ = rows.indices(shape[0])
        count = max(0, last - first)
        raw = self._read(info.name, stored.offset + first * row_bytes, count * row_bytes)
        left, right, _ = columns.indices(shape[1])
        if (left, right) == (0, shape[1]):
            return dequantize(raw, info.ggml_type, (count, shape[1]))
        start, stop, part = covering_blocks(raw, info.ggml_type, (count, shape[1]), left, right)
        weight = dequantize(part, info.ggml_type, (count, stop - start))
        return weight[:, left - start : right - start].contiguous()

    def _read(self, name: str, offset: int, num_bytes: int) -> bytearray:
        if self._fd < 0:
            raise ConfigError(f"{self._path} is closed")
        raw = bytearray(num_bytes)
        view = memoryview(raw)
        done = 0
        try:
            while done < num_bytes:  # Linux reads at most 2 GiB at once
                got = os.preadv(self._fd, [view[done:]], offset + done)
                if got == 0:
                    raise ConfigError(f"{self._path} was cut short: tensor {name!r}")
                done += got
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be read: {error}") from error
        finally:
            view.release()
        return raw


def _half_rotated(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of each head from pairs ``(2i, 2i + 1)`` to ``(i, i + head_dim / 2)``."""
    rows = weight.numpy()  # not torch: see ``dequantize``
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return torch.from_numpy(np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape))
