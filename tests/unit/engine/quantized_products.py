"""Prints a digest of quantised products as this process's instruction set computes them.

Run as ``python -m tests.unit.engine.quantized_products [--no-vnni]``; what is compiled depends on
the environment (NUMBA_CPU_NAME), so two settings need two processes. One tile height is compiled
per width instead of the whole kernel, which would take a minute.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

from mesh.threads import configure_threads

ROWS = 4


def digest() -> str:
    """Over the tiles of both widths for a few columns' weights."""
    import numba
    import numpy as np

    from engine.backends.cpu.quantized_linear import pack, quantize_row
    from engine.backends.cpu.quantized_tile import COLUMNS, GROUP, quantized_tile
    from tests.unit.engine.quantized_format import random_matrix

    def tile_of(bits: int) -> Any:
        @numba.njit
        def tile(codes: Any, scales: Any, sums: Any, weights: Any, out: Any) -> None:
            quantized_tile(
                ROWS, bits, codes.ctypes.data, codes.shape[1], scales.ctypes.data,
                sums.ctypes.data, scales.shape[1] * 4, weights.ctypes.data, weights.shape[0],
                out.ctypes.data, out.shape[1] * 4,
            )  # fmt: skip

        return tile

    hashed = hashlib.sha256()
    for bits in (8, 4):
        packed = pack(random_matrix(64, 576, seed=21), bits)
        x = random_matrix(ROWS, 576, seed=22).numpy()
        codes = np.empty(x.shape, np.int8)
        scales, sums = np.empty((2, ROWS, 576 // GROUP), np.float32)
        for row in range(ROWS):
            quantize_row(x[row], codes[row], scales[row], sums[row])
        tile = tile_of(bits)
        for weights in packed:
            out = np.full((ROWS, COLUMNS), np.nan, np.float32)
            tile(codes, scales, sums, weights, out)
            assert np.isfinite(out).all()
            hashed.update(out.tobytes())
    return hashed.hexdigest()


if __name__ == "__main__":
    configure_threads()
    if "--no-vnni" in sys.argv:
        from engine.backends.cpu import quantized_tile as module

        module.has_vnni = lambda: False
    print(digest())
