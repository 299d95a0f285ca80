"""The packed weight format read back naively, and inputs that any process can make again."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.backends.cpu.byte_products import GROUP
from engine.backends.cpu.quantized_linear import quantize_row
from engine.backends.cpu.quantized_tile import COLUMNS

Wide = npt.NDArray[np.float64]


def random_matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Normal numbers whose magnitude differs between groups of 32 columns."""
    rng = np.random.default_rng([seed, rows, columns])
    values = rng.standard_normal((rows, columns)) * np.exp2(
        rng.integers(-4, 3, (rows, columns // GROUP)).repeat(GROUP, axis=1)
    )
    return torch.from_numpy(values.astype(np.float32))


def unpack(packed: npt.NDArray[np.uint8], bits: int) -> tuple[Wide, Wide, Wide]:
    """(codes, scales, minima) of a packed matrix, each [padded N, K] in float64."""
    blocks, groups, _ = packed.shape
    shape = (blocks * COLUMNS, groups * GROUP)
    codes, scales, minima = np.empty(shape), np.empty(shape), np.empty(shape)
    for n in range(shape[0]):
        for g in range(groups):
            chunk = packed[n // COLUMNS, g]
            header = chunk[: 4 * COLUMNS].view(np.float16)
            columns = slice(g * GROUP, (g + 1) * GROUP)
            scales[n, columns] = header[n % COLUMNS]
            minima[n, columns] = header[COLUMNS + n % COLUMNS]
            for i in range(GROUP):
                vector = i // 4
                shift = 0
                if bits == 4:
                    vector, shift = vector % 4, 4 * (vector // 4)
                byte = int(chunk[4 * COLUMNS + 64 * vector + 4 * (n % COLUMNS) + i % 4])
                codes[n, g * GROUP + i] = byte >> shift & (2**bits - 1)
    return codes, scales, minima


def dequantised(packed: npt.NDArray[np.uint8], bits: int) -> Wide:
    """[padded N, K] in float64."""
    codes, scales, minima = unpack(packed, bits)
    return codes * scales + minima


def quantised_rows(x: torch.Tensor) -> tuple[Wide, Wide]:
    """(codes, scales) of activation rows, each [T, K] in float64, as the kernel makes them."""
    rows, width = x.shape
    codes = np.empty((rows, width), np.int8)
    scales, sums = np.empty((2, rows, width // GROUP), np.float32)
    for row in range(rows):
        quantize_row(x.numpy()[row], codes[row], scales[row], sums[row])
    return codes.astype(np.float64), scales.astype(np.float64).repeat(GROUP, axis=1)
