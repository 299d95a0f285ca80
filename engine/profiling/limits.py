"""What this machine can do at most, measured where the model runs.

Reading is measured by summing a buffer far larger than the caches; computing by a square matrix
product (float32 on a CPU, bfloat16 on a GPU) and by one of the model's own products for many rows,
whichever is faster: quantised kernels have another limit than float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.backend import Linear

_BUFFER_BYTES = 256 << 20
_GEMM_SIZE = {"cpu": 1024, "cuda": 8192}
_NUM_RUNS = 4
_NUM_ROWS = 512


@dataclass(slots=True, frozen=True)
class Limits:
    """Best of several runs, with the threads that the calling thread has set up."""

    bytes_per_s: float
    flops_per_s: float


def measure_limits(
    device: torch.device, product: Linear, in_features: int, dtype: torch.dtype
) -> Limits:
    """Some tenths of a second; call on the thread that runs the model, between two steps.

    Args:
        device: Where the model runs.
        product: One of its weight matrices.
        in_features: Columns of it.
        dtype: Of activations.
    """
    buffer = torch.ones(_BUFFER_BYTES // 4, device=device)
    bytes_per_s = _BUFFER_BYTES / _best_s(buffer.sum, device)
    del buffer
    size = _GEMM_SIZE[device.type]
    square_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.ones(size, size, device=device, dtype=square_dtype)
    square = 2 * size**3 / _best_s(lambda: a @ a, device)
    x = torch.ones(_NUM_ROWS, in_features, device=device, dtype=dtype)
    num_flops = 2 * x.numel() * product(x).shape[1]
    own = num_flops / _best_s(lambda: product(x), device)
    return Limits(bytes_per_s, max(square, own))


def _best_s(run: Callable[[], torch.Tensor], device: torch.device) -> float:
    best_s = float("inf")
    for _ in range(_NUM_RUNS):
        start_s = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s
