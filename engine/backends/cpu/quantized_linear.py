"""Linear layers with int8 or int4 weights, quantised in groups of 32 along the input dimension.

Activations are quantised to int8 in the same groups, per row: a row's result never depends on what
else is in the batch, and an outlier costs precision only within its own group (Dettmers et al.,
arXiv:2208.07339, for why that matters; the format is that of GGUF's Q4_1 and Q8_1).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from engine.backends.cpu.byte_products import GROUP, byte_products
from engine.backends.cpu.elementwise import SERIAL_ELEMENTS, address
from engine.backends.cpu.intrinsics import codes_at, inner, largest_magnitude, matrix
from engine.backends.cpu.level import LEVEL
from engine.backends.cpu.quantized_tile import COLUMNS, chunk_bytes, quantized_rows
from engine.backends.cpu.workspace import Workspace
from mesh.errors import ConfigError


def pack(weight: torch.Tensor, bits: int) -> npt.NDArray[np.uint8]:
    """Quantise [N, K] float32 into the tile's chunks, uint8 [ceil(N / 16), K / 32, chunk bytes].

    Each group of 32 is mapped to codes ``0 … 2^bits - 1`` between its minimum and maximum.

    Raises:
        ConfigError: K is not a multiple of 32, or a weight is outside float16's range.
    """
    out_features, in_features = weight.shape
    if in_features % GROUP:
        raise ConfigError(
            f"weights: int{bits} needs input sizes that are multiples of {GROUP}, "
            f"not {in_features}; use fp32"
        )
    padded = -(-out_features // COLUMNS) * COLUMNS
    if padded != out_features:
        weight = torch.nn.functional.pad(weight, (0, 0, 0, padded - out_features))
    groups = weight.view(padded, in_features // GROUP, GROUP)
    low, high = torch.aminmax(groups, dim=2)
    scale = ((high - low) / (2**bits - 1)).to(torch.float16)
    minimum = low.to(torch.float16)
    if not (scale.isfinite().all() and minimum.isfinite().all()):
        raise ConfigError(f"weights: int{bits} cannot hold values beyond ±65504; use fp32")
    wide_scale = scale.float().clamp_min(1e-12)[:, :, None]
    codes = ((groups - minimum.float()[:, :, None]) / wide_scale).round_()
    codes = codes.clamp_(0, 2**bits - 1).to(torch.uint8)
    blocks = padded // COLUMNS
    num_groups = in_features // GROUP

    def by_block(values: torch.Tensor) -> npt.NDArray[np.uint8]:
        ordered = values.view(blocks, COLUMNS, num_groups).transpose(1, 2).contiguous()
        return ordered.view(torch.uint8).view(blocks, num_groups, 2 * COLUMNS).numpy()

    vectors = codes.view(blocks, COLUMNS, num_groups, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    vectors = vectors.reshape(blocks, num_groups, GROUP // 4, 64)
    if bits == 4:
        half = GROUP // 8
        vectors = vectors[:, :, :half] | (vectors[:, :, half:] << 4)
    packed = np.empty((blocks, num_groups, chunk_bytes(bits)), np.uint8)
    packed[:, :, : 2 * COLUMNS] = by_block(scale)
    packed[:, :, 2 * COLUMNS : 4 * COLUMNS] = by_block(minimum)
    packed[:, :, 4 * COLUMNS :] = vectors.reshape(blocks, num_groups, -1).numpy()
    return packed


@inner
def _rounded(value: Any) -> Any:
    """To the nearest integer, halves away from zero."""
    return np.int32(value + (np.float32(0.5) if value >= 0 else np.float32(-0.5)))


@inner
def quantize_row(x: Any, codes: Any, scales: Any, sums: Any) -> None:
    """One activation row [K] → codes [K], per-group scale [K / 32] and ``scale * Σ codes``.

    Codes are int8, or int16 with those of a group's even k first (see ``byte_products``).
    """
    for group in range(scales.shape[0]):
        base = group * GROUP
        largest = largest_magnitude(x[base : base + GROUP])
        inverse = np.float32(127.0) / max(largest, np.float32(1e-30))
        total = np.int32(0)
        if codes.itemsize == 1:
            for i in range(GROUP):
                code = _rounded(x[base + i] * inverse)
                codes[base + i] = code
                total += code
        else:
            for i in range(GROUP // 2):
                even = _rounded(x[base + 2 * i] * inverse)
                odd = _rounded(x[base + 2 * i + 1] * inverse)
                codes[base + i] = even
                codes[base + GROUP // 2 + i] = odd
                total += even + odd
        scale = largest * np.float32(1.0 / 127.0)
        scales[group] = scale
        sums[group] = scale * np.float32(total)


@lru_cache
def _matmul_kernel(bits: int) -> Any:
    """Compile ``out = x @ dequantised(packed).T`` for one code width.

    Arrays are addresses; ``scratch`` is for the quantised activations. Threads split the columns:
    each keeps 16 columns' weights in its L1 cache for all rows.
    """
    BITS = bits
    CHUNK = chunk_bytes(bits)

    KIND = byte_products(LEVEL, bits).activation_dtype
    WIDTH = KIND().itemsize

    @numba.njit(parallel=True, nogil=True, cache=True, boundscheck=False)
    def matmul(
        x: Any, rows: Any, size: Any, packed: Any, blocks: Any, scratch: Any, out: Any,
        threads: Any,
    ) -> None:  # fmt: skip
        groups = size // GROUP
        scales = scratch
        sums = scales + rows * groups * 4
        codes = sums + rows * groups * 4
        x_rows = matrix(x, rows, size)
        scale_rows, sum_rows = matrix(scales, rows, groups), matrix(sums, rows, groups)
        code_rows = codes_at(codes, KIND, rows, size)
        if rows * size <= SERIAL_ELEMENTS:
            for r in range(rows):
                quantize_row(x_rows[r], code_rows[r], scale_rows[r], sum_rows[r])
        else:
            for r in numba.prange(rows):
                quantize_row(x_rows[r], code_rows[r], scale_rows[r], sum_rows[r])
        for thread in numba.prange(threads):
            for block in range(blocks * thread // threads, blocks * (thread + 1) // threads):
                quantized_rows(
                    BITS, rows, codes, size * WIDTH, scales, sums, groups * 4,
                    packed + block * groups * CHUNK, groups,
                    out + block * COLUMNS * 4, blocks * COLUMNS * 4,
                )  # fmt: skip

    return matmul


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _dequantize_rows(packed: Any, scales: Any, token_ids: Any, out: Any) -> None:
    """out[t] = row ``token_ids[t]`` of an 8-bit packed matrix; ``scales`` are its fp16 headers."""
    groups = packed.shape[1]
    for t in range(token_ids.shape[0]):
        block = token_ids[t] // COLUMNS
        column = token_ids[t] % COLUMNS
        for group in range(groups):
            scale = np.float32(scales[block, group, column])
            minimum = np.float32(scales[block, group, COLUMNS + column])
            for i in range(GROUP):
                at = 4 * COLUMNS + (i // 4) * 64 + column * 4 + i % 4
                out[t, group * GROUP + i] = packed[block, group, at] * scale + minimum


class QuantizedLinear:
    """``x @ weight.T + bias`` with weights of 8 or 4 bits; keeps no other copy of them."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, bits: int, workspace: Workspace
    ) -> None:
        """Quantise [out, in] float32.

        Raises:
            ConfigError: see ``pack``.
        """
        self.out_features, in_features = weight.shape
        self.packed = pack(weight, bits)
        self.bias = bias
        self.packed_address, self.num_blocks = self.packed.ctypes.data, len(self.packed)
        self.kernel = _matmul_kernel(bits)
        width = byte_products(LEVEL, bits).activation_dtype().itemsize
        self.scratch_bytes_per_row = in_features // GROUP * 8 + in_features * width
        """A scale and a sum for each group of activations, and the codes."""
        self._workspace = workspace
        self.num_bytes = self.packed.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] → [T, out] float32."""
        rows, size = x.shape
        out = torch.empty(rows, self.num_blocks * COLUMNS)
        self.kernel(
            address(x), rows, size, self.packed_address, self.num_blocks,
            self._workspace.reserve(rows * self.scratch_bytes_per_row), address(out),
            self._workspace.num_threads,
        )  # fmt: skip
        if out.shape[1] != self.out_features:
            out = out[:, : self.out_features].contiguous()
        return out if self.bias is None else out.add_(self.bias)


class QuantizedEmbedding:
    """Rows of an 8-bit packed table, which a tied output head can share."""

    def __init__(self, packed: npt.NDArray[np.uint8], hidden_size: int, *, shared: bool) -> None:
        self._packed = packed
        self._headers = packed[:, :, : 4 * COLUMNS].view(np.float16).astype(np.float32)
        self._hidden_size = hidden_size
        self.num_bytes = self._headers.nbytes + (0 if shared else packed.nbytes)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 → [T, H] float32, freshly allocated (it becomes the residual stream)."""
        out = torch.empty(len(token_ids), self._hidden_size)
        _dequantize_rows(self._packed, self._headers, token_ids.numpy(), out.numpy())
        return out
