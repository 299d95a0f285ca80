"""Norms, activations, rotary embedding and KV writes: each one pass over its rows, fused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch

from engine.backends.cpu.intrinsics import (
    exp_f32,
    inner,
    largest_magnitude,
    matrix,
    store_float32,
    sum_of_squares,
)

_GELU_LINEAR = np.float32(2 * 0.7978845608028654)
_GELU_CUBIC = np.float32(2 * 0.7978845608028654 * 0.044715)
SERIAL_ELEMENTS = 1 << 15
"""Up to this many elements (~10 µs), waking the other threads costs more than the arithmetic."""


@inner
def _norm_row(x: Any, weight: Any, eps: Any, out: Any) -> None:
    size = x.shape[0]
    factor = np.float32(1.0) / np.sqrt(sum_of_squares(x) / np.float32(size) + eps)
    for i in range(size):
        out[i] = x[i] * factor * weight[i]


@inner
def _add_norm_row(x: Any, residual: Any, weight: Any, eps: Any, out: Any) -> None:
    size = x.shape[0]
    for i in range(size):
        residual[i] += x[i]
    factor = np.float32(1.0) / np.sqrt(sum_of_squares(residual) / np.float32(size) + eps)
    for i in range(size):
        out[i] = residual[i] * factor * weight[i]


@inner
def _act_mul_row(gate_up: Any, gelu: Any, out: Any) -> None:
    """Both activations are ``x * sigmoid(f(x))``: f is x (SiLU) or GELU's tanh argument doubled."""
    size = out.shape[0]
    gates = gate_up[:size]
    ups = gate_up[size:]  # an index of the form size + i would keep LLVM from vectorising
    linear = _GELU_LINEAR if gelu else np.float32(1.0)
    cubic = _GELU_CUBIC if gelu else np.float32(0.0)
    for i in range(size):
        gate = gates[i]
        inner = gate * (linear + cubic * gate * gate)
        out[i] = gate / (np.float32(1.0) + exp_f32(-inner)) * ups[i]


@inner
def _rope_row(row: Any, first: Any, last: Any, dim: Any, cos: Any, sin: Any) -> None:
    half = dim // 2
    for head in range(first, last):
        base = head * dim
        for i in range(half):
            low = row[base + i]
            high = row[base + half + i]
            row[base + i] = low * cos[i] - high * sin[i]
            row[base + half + i] = high * cos[i] + low * sin[i]


@inner
def _norm_heads(row: Any, first: Any, last: Any, dim: Any, weight: Any, eps: Any) -> None:
    for head in range(first, last):
        x = row[head * dim : (head + 1) * dim]
        _norm_row(x, weight, eps, x)


@inner
def _store_row(x: Any, stored: Any, scales: Any, index: Any) -> None:
    """Write one K or V row in the cache's format; int8 rows get a scale of their own."""
    dim = stored.shape[0]
    if stored.itemsize == 1:
        largest = largest_magnitude(x)
        scales[index] = largest * np.float32(1.0 / 127.0)
        inverse = np.float32(127.0) / max(largest, np.float32(1e-30))
        for d in range(dim):
            store_float32(stored, d, np.rint(x[d] * inverse))
    else:
        for d in range(dim):
            store_float32(stored, d, x[d])


@inner
def _rope_write_row(
    row: Any, position: Any, slot: Any, cos: Any, sin: Any, q_norm: Any, k_norm: Any, eps: Any,
    keys: Any, values: Any, scales: Any, layer: Any, num_heads: Any,
) -> None:  # fmt: skip
    num_kv_heads, block_size, dim = values.shape[2], values.shape[3], values.shape[4]
    num_rotated = num_heads + num_kv_heads
    if q_norm.shape[0] > 0:
        _norm_heads(row, 0, num_heads, dim, q_norm, eps)
        _norm_heads(row, num_heads, num_rotated, dim, k_norm, eps)
    _rope_row(row, 0, num_rotated, dim, cos[position], sin[position])
    block = slot // block_size
    offset = slot % block_size
    for head in range(num_kv_heads):
        key = row[(num_heads + head) * dim : (num_heads + head + 1) * dim]
        value = row[(num_rotated + head) * dim : (num_rotated + head + 1) * dim]
        stored_key = keys[block, layer, head, :, offset]
        stored_value = values[block, layer, head, offset]
        _store_row(key, stored_key, scales[block, layer, 0, head], offset)
        _store_row(value, stored_value, scales[block, layer, 1, head], offset)


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _rms_norm_serial(x: Any, weight: Any, rows: Any, size: Any, eps: Any, out: Any) -> None:
    x_rows, out_rows = matrix(x, rows, size), matrix(out, rows, size)
    weights = matrix(weight, 1, size)
    for t in range(rows):
        _norm_row(x_rows[t], weights[0], eps, out_rows[t])


@numba.njit(parallel=True, nogil=True, cache=True, boundscheck=False)
def _rms_norm_parallel(x: Any, weight: Any, rows: Any, size: Any, eps: Any, out: Any) -> None:
    x_rows, out_rows = matrix(x, rows, size), matrix(out, rows, size)
    weights = matrix(weight, 1, size)
    for t in numba.prange(rows):
        _norm_row(x_rows[t], weights[0], eps, out_rows[t])


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _add_rms_norm_serial(
    x: Any, residual: Any, weight: Any, rows: Any, size: Any, eps: Any, out: Any
) -> None:
    x_rows, out_rows = matrix(x, rows, size), matrix(out, rows, size)
    residual_rows, weights = matrix(residual, rows, size), matrix(weight, 1, size)
    for t in range(rows):
        _add_norm_row(x_rows[t], residual_rows[t], weights[0], eps, out_rows[t])


@numba.njit(parallel=True, nogil=True, cache=True, boundscheck=False)
def _add_rms_norm_parallel(
    x: Any, residual: Any, weight: Any, rows: Any, size: Any, eps: Any, out: Any
) -> None:
    x_rows, out_rows = matrix(x, rows, size), matrix(out, rows, size)
    residual_rows, weights = matrix(residual, rows, size), matrix(weight, 1, size)
    for t in numba.prange(rows):
        _add_norm_row(x_rows[t], residual_rows[t], weights[0], eps, out_rows[t])


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _act_mul_serial(gate_up: Any, gelu: Any, rows: Any, size: Any, out: Any) -> None:
    gate_up_rows, out_rows = matrix(gate_up, rows, 2 * size), matrix(out, rows, size)
    for t in range(rows):
        _act_mul_row(gate_up_rows[t], gelu, out_rows[t])


@numba.njit(parallel=True, nogil=True, cache=True, boundscheck=False)
def _act_mul_parallel(gate_up: Any, gelu: Any, rows: Any, size: Any, out: Any) -> None:
    gate_up_rows, out_rows = matrix(gate_up, rows, 2 * size), matrix(out, rows, size)
    for t in numba.prange(rows):
        _act_mul_row(gate_up_rows[t], gelu, out_rows[t])


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _rope_write_serial(
    qkv: Any, positions: Any, slots: Any, cos: Any, sin: Any, q_norm: Any, k_norm: Any, eps: Any,
    keys: Any, values: Any, scales: Any, layer: Any, num_heads: Any,
) -> None:  # fmt: skip
    for t in range(qkv.shape[0]):
        _rope_write_row(
            qkv[t], positions[t], slots[t], cos, sin, q_norm, k_norm, eps,
            keys, values, scales, layer, num_heads,
        )  # fmt: skip


@numba.njit(parallel=True, nogil=True, cache=True, boundscheck=False)
def _rope_write_parallel(
    qkv: Any, positions: Any, slots: Any, cos: Any, sin: Any, q_norm: Any, k_norm: Any, eps: Any,
    keys: Any, values: Any, scales: Any, layer: Any, num_heads: Any,
) -> None:  # fmt: skip
    for t in numba.prange(qkv.shape[0]):
        _rope_write_row(
            qkv[t], positions[t], slots[t], cos, sin, q_norm, k_norm, eps,
            keys, values, scales, layer, num_heads,
        )  # fmt: skip


def address(tensor: torch.Tensor) -> int:
    """Where a tensor's contiguous elements lie."""
    assert tensor.is_contiguous()
    return tensor.data_ptr()


@dataclass(slots=True, frozen=True)
class _SizedKernel:
    """One kernel in two forms."""

    serial: Any
    parallel: Any

    def of(self, num_elements: int) -> Any:
        """The form for so many: waking threads costs more than a little arithmetic."""
        return self.serial if num_elements <= SERIAL_ELEMENTS else self.parallel


RMS_NORM = _SizedKernel(_rms_norm_serial, _rms_norm_parallel)
ADD_RMS_NORM = _SizedKernel(_add_rms_norm_serial, _add_rms_norm_parallel)
ACT_MUL = _SizedKernel(_act_mul_serial, _act_mul_parallel)
ROPE_WRITE = _SizedKernel(_rope_write_serial, _rope_write_parallel)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """``out[t] = x[t] / rms(x[t]) * weight`` for x, out [T, H] float32."""
    rows, size = x.shape
    kernel = RMS_NORM.of(rows * size)
    kernel(address(x), address(weight), rows, size, np.float32(eps), address(out))


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """``residual += x`` in place, then ``out = rms_norm(residual)``; all [T, H] float32."""
    rows, size = x.shape
    kernel = ADD_RMS_NORM.of(rows * size)
    kernel(
        address(x), address(residual), address(weight), rows, size, np.float32(eps), address(out)
    )


def act_mul(gate_up: torch.Tensor, gelu: bool, out: torch.Tensor) -> None:
    """``out = act(gate_up[:, :I]) * gate_up[:, I:]`` for gate_up [T, 2 I]; SiLU or tanh-GELU."""
    rows, size = out.shape
    kernel = ACT_MUL.of(rows * size)
    kernel(address(gate_up), gelu, rows, size, address(out))


def rope_write_kv(
    qkv: Any, positions: Any, slots: Any, cos: Any, sin: Any, q_norm: Any, k_norm: Any, eps: Any,
    keys: Any, values: Any, scales: Any, layer: int, num_heads: int,
) -> None:  # fmt: skip
    """Norm (unless the weights are empty) and rotate q, k of qkv [T, (Hq + 2 Hkv) * D] in place,
    and store k and v in their slots of the KVView's arrays."""
    kernel = ROPE_WRITE.of(qkv.size)
    kernel(
        qkv, positions, slots, cos, sin, q_norm, k_norm, eps, keys, values, scales, layer, num_heads
    )
