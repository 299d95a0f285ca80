"""The order in which programs take the tiles of a matrix product."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped_tile(program, num_m, num_n, GROUP: tl.constexpr):
    """(tile_m, tile_n) of a program: bands of GROUP rows of tiles, column after column.

    Programs that run at the same time so share their rows' activations and their columns' weights
    in the L2 cache (the order of Triton's matrix multiplication tutorial).
    """
    band = GROUP * num_n
    first_m = program // band * GROUP
    height = tl.minimum(num_m - first_m, GROUP)
    within = program % band
    return first_m + within % height, within // height
