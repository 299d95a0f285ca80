"""Times launches on a device, and what the device can do at most."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_CACHE_BYTES = 256 << 20
"""More than any card's second-level cache."""
_BUDGET_S = 0.15
_RUNS = (5, 100)
_COPY_BYTES = 2 << 30
_GEMM_SIZE = 8192


class Stopwatch:
    """Each run starts with cold caches; the median counts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        self._flushed = torch.empty(_CACHE_BYTES if is_cuda else 0, dtype=torch.uint8).to(device)

    def seconds(self, run: Callable[[], object]) -> float:
        """Median time of one run, after one that is not timed."""
        run()
        first_s = self._once(run)
        least, most = _RUNS
        count = max(least, min(most, int(_BUDGET_S / max(first_s, 1e-9))))
        return statistics.median(self._once(run) for _ in range(count))

    def _once(self, run: Callable[[], object]) -> float:
        self._flushed.zero_()
        if self._device.type != "cuda":
            start_s = time.perf_counter()
            run()
            return time.perf_counter() - start_s
        # The flush keeps the device busy while the host launches what is timed.
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


@dataclass(slots=True, frozen=True)
class Floors:
    """What this card reached with PyTorch's own copy and product."""

    bytes_per_s: float
    """Read and written, both counted."""
    flops_per_s: float
    """bfloat16."""

    def seconds(self, num_bytes: int, num_flops: int) -> float:
        """The least time for both, whichever takes longer."""
        return max(num_bytes / self.bytes_per_s, num_flops / self.flops_per_s)


def measure_floors(
    watch: Stopwatch, device: torch.device, *, copy_bytes: int = _COPY_BYTES,
    gemm_size: int = _GEMM_SIZE,
) -> Floors:  # fmt: skip
    """A second or two."""
    source = torch.ones(copy_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copied_s = watch.seconds(functools.partial(target.copy_, source))
    del source, target
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.randn(gemm_size, gemm_size, device=device).to(dtype)
    b = torch.randn(gemm_size, gemm_size, device=device).to(dtype)
    product_s = watch.seconds(lambda: a @ b)
    return Floors(2 * copy_bytes / copied_s, 2 * gemm_size**3 / product_s)
