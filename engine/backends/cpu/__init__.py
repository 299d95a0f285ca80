"""CPU backend: numba kernels beside torch's int8 and fp32 matrix multiplication."""

import os

import torch  # loads the OpenMP runtime that numba's threading layer then shares

os.environ.setdefault("NUMBA_THREADING_LAYER", "omp")

__all__ = ["torch"]
