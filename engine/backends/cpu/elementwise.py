"""Norms, activations, rotary embedding and KV writes: each one pass over its rows, fused."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine.backends.cpu.intrinsics import exp_f32

_SERIAL_ROWS = 8
"""Below this many rows, waking the other threads costs more than the arithmetic."""


@numba.njit(nogil=True, cache=True, fastmath=True, boundscheck=False)
def _norm_row(x: Any, weight: Any, eps: Any, out: Any) -> None:
    size = x.shape[0]
    total = np.float32(0.0)
    for i in range(size):
        total += x[i] * x[i]
    factor = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        out[i] = x[i] * factor * weight[i]


@numba.njit(nogil=True, cache=True, fastmath=True, boundscheck=False)
def _add_norm_row(x: Any, residual: Any, weight: Any, eps: Any, out: Any) -> None:
    size = x.shape[0]
    total = np.float32(0.0)
    for i in range(size):
        value = x[i] + residual[i]
        residual[i] = value
        total += value * value
    factor = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        out[i] = residual[i] * factor * weight[i]


@numba.njit(nogil=True, cache=True, fastmath=True, boundscheck=False)
def _silu_mul_row(gate_up: Any, out: Any) -> None:
    size = out.shape[0]
    for i in range(size):
        gate = gate_up[i]
        decay = exp_f32(-abs(gate))
        inverse = np.float32(1.0) / (np.float32(1.0) + decay)
        sigmoid = inverse if gate >= 0 else decay * inverse
        out[i] = gate * sigmoid * gate_up[size + i]


@numba.njit(nogil=True, cache=True, fastmath=True, boundscheck=False)
def _rope_row(row: Any, heads: Any, dim: Any, cos: Any, sin: Any) -> None:
    half = dim // 2
    for head in range(heads):
        base = head * dim
        for i in range(half):
            low = row[base + i]
            high = row[base + half + i]
            row[base + i] = low * cos[i] - high * sin[i]
            row[base + half + i] = high * cos[i] + low * sin[i]


@numba.njit(nogil=True, cache=True, fastmath=True, boundscheck=False)
def _rope_write_row(
    row: Any, position: Any, slot: Any, cos: Any, sin: Any, kv: Any, layer: Any, num_heads: Any
) -> None:
    num_kv_heads, block_size, dim = kv.shape[3], kv.shape[4], kv.shape[5]
    _rope_row(row, num_heads + num_kv_heads, dim, cos[position], sin[position])
    block = slot // block_size
    offset = slot % block_size
    for head in range(num_kv_heads):
        key = (num_heads + head) * dim
        value = (num_heads + num_kv_heads + head) * dim
        for d in range(dim):
            kv[block, layer, 0, head, offset, d] = row[key + d]
            kv[block, layer, 1, head, offset, d] = row[value + d]


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _rms_norm_serial(x: Any, weight: Any, eps: Any, out: Any) -> None:
    for t in range(x.shape[0]):
        _norm_row(x[t], weight, eps, out[t])


@numba.njit(parallel=True, nogil=True, cache=True, boundscheck=False)
def _rms_norm_parallel(x: Any, weight: Any, eps: Any, out: Any) -> None:
    for t in numba.prange(x.shape[0]):
        _norm_row(x[t], weight, eps, out[t])


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _add_rms_norm_serial(x: Any, residual: Any, weight: Any, eps: Any, out: Any) -> None:
    for t in range(x.shape[0]):
        _add_norm_row(x[t], residual[t], weight, eps, out[t])


@numba.njit(parallel=True, nogil=True, cache=True, boundscheck=False)
def _add_rms_norm_parallel(x: Any, residual: Any, weight: Any, eps: Any, out: Any) -> None:
    for t in numba.prange(x.shape[0]):
        _add_norm_row(x[t], residual[t], weight, eps, out[t])


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _silu_mul_serial(gate_up: Any, out: Any) -> None:
    for t in range(gate_up.shape[0]):
        _silu_mul_row(gate_up[t], out[t])


@numba.njit(parallel=True, nogil=True, cache=True, boundscheck=False)
def _silu_mul_parallel(gate_up: Any, out: Any) -> None:
    for t in numba.prange(gate_up.shape[0]):
        _silu_mul_row(gate_up[t], out[t])


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _rope_write_serial(
    qkv: Any, positions: Any, slots: Any, cos: Any, sin: Any, kv: Any, layer: Any, num_heads: Any
) -> None:
    for t in range(qkv.shape[0]):
        _rope_write_row(qkv[t], positions[t], slots[t], cos, sin, kv, layer, num_heads)


@numba.njit(parallel=True, nogil=True, cache=True, boundscheck=False)
def _rope_write_parallel(
    qkv: Any, positions: Any, slots: Any, cos: Any, sin: Any, kv: Any, layer: Any, num_heads: Any
) -> None:
    for t in numba.prange(qkv.shape[0]):
        _rope_write_row(qkv[t], positions[t], slots[t], cos, sin, kv, layer, num_heads)


def rms_norm(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """``out[t] = x[t] / rms(x[t]) * weight`` for x, out [T, H]."""
    (_rms_norm_serial if len(x) < _SERIAL_ROWS else _rms_norm_parallel)(x, weight, eps, out)


def add_rms_norm(x: Any, residual: Any, weight: Any, eps: Any, out: Any) -> None:
    """``residual += x`` in place, then ``out = rms_norm(residual)``; all [T, H]."""
    kernel = _add_rms_norm_serial if len(x) < _SERIAL_ROWS else _add_rms_norm_parallel
    kernel(x, residual, weight, eps, out)


def silu_mul(gate_up: Any, out: Any) -> None:
    """``out = silu(gate_up[:, :I]) * gate_up[:, I:]`` for gate_up [T, 2 I]."""
    (_silu_mul_serial if len(out) < _SERIAL_ROWS else _silu_mul_parallel)(gate_up, out)


def rope_write_kv(
    qkv: Any, positions: Any, slots: Any, cos: Any, sin: Any, kv: Any, layer: int, num_heads: int
) -> None:
    """Rotate q and k of qkv [T, (Hq + 2 Hkv) * D] in place, and store k and v in their slots."""
    kernel = _rope_write_serial if len(qkv) < _SERIAL_ROWS else _rope_write_parallel
    kernel(qkv, positions, slots, cos, sin, kv, layer, num_heads)
