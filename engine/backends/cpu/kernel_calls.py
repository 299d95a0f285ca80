"""Calls of every kernel that a worker needs, on tiny inputs of the types that a model gives it.

numba compiles a kernel at its first call with arguments of new types; sizes do not matter, but
which kernel is called may depend on them: one row or many, few elements or more than
``SERIAL_ELEMENTS``, one thread or several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from engine.backend import (
    DenseLayer,
    KVCacheSpec,
    KVDtype,
    LayerForm,
    Linear,
    QKNorm,
    RopeTable,
)
from engine.backends.cpu.attention import CpuStep
from engine.backends.cpu.backend import CpuBackend, WeightScheme
from engine.batch import BatchInputs

Part = Literal["attention", "others"]
PARTS: tuple[Part, ...] = get_args(Part)
"""Two processes compile a part each; attention takes about half of the time. No kernel is in both:
numba's cache has no lock, and of two that add to one kernel's index at once, the index may name
the other's code."""

_HIDDEN = 1024
_INTERMEDIATE = 1024
_VOCABULARY = 80
_HEAD_DIM = 64
_QUERY_HEADS, _KV_HEADS = 14, 2
_BLOCK_SIZE = 16
_ROWS = (1, 2, 4, 8, 16, 64)
"""The last is past ``SERIAL_ELEMENTS`` in every kernel."""
_THREADS = (1, 2)
_EPS = 1e-6


@dataclass(slots=True, frozen=True)
class KernelCall:
    """Kernels that are compiled together."""

    name: str
    """For people."""
    run: Callable[[CpuBackend, int], object]
    """Takes a backend that has a KV cache, and a number of rows."""


def kernel_calls(part: Part) -> tuple[KernelCall, ...]:
    """A part's calls."""
    if part == "attention":
        return (KernelCall("paged attention", _attention),)
    return (
        KernelCall("rotary embedding", _rope),
        KernelCall("linear layers", _linear),
        KernelCall("embedding and head", _embedding_and_head),
        KernelCall("norms", _norms),
        KernelCall("activations", _activations),
        KernelCall("loop over layers", _layer_stack),
    )


def run_everywhere(call: KernelCall, weights: WeightScheme, kv_dtype: KVDtype) -> None:
    """Make the call in every way that may need other kernels."""
    for num_threads in _THREADS:
        backend = small_backend(weights, kv_dtype, num_threads)
        for rows in _ROWS:
            begin_prompt(backend, rows)  # sets the threads
            call.run(backend, rows)


def small_backend(weights: WeightScheme, kv_dtype: KVDtype, num_threads: int) -> CpuBackend:
    """A backend with a KV cache for a prompt of some tokens."""
    backend = CpuBackend(weights, num_threads)
    backend.allocate_kv_cache(
        KVCacheSpec(
            num_blocks=_ROWS[-1] // _BLOCK_SIZE, num_layers=2, num_kv_heads=_KV_HEADS,
            block_size=_BLOCK_SIZE, head_dim=_HEAD_DIM, dtype=kv_dtype,
        )
    )  # fmt: skip
    return backend


def _linear(backend: CpuBackend, rows: int) -> None:
    x = torch.ones(rows, _HIDDEN)
    weight = torch.ones(_VOCABULARY, _HIDDEN)
    backend.linear(weight)(x)
    backend.linear(weight, torch.ones(_VOCABULARY))(x)
    backend.router(weight)(x)


def _embedding_and_head(backend: CpuBackend, rows: int) -> None:
    table = torch.ones(_VOCABULARY, _HIDDEN)
    for own_head in (None, table):
        embedding, head = backend.embedding_and_head(table, own_head)
        head(embedding(torch.zeros(rows, dtype=torch.int64)))


def _norms(backend: CpuBackend, rows: int) -> None:
    x, weight = torch.ones(rows, _HIDDEN), torch.ones(_HIDDEN)
    backend.rms_norm(x, weight, _EPS)
    backend.add_rms_norm(x, torch.ones_like(x), weight, _EPS)


def _activations(backend: CpuBackend, rows: int) -> None:
    for activation in ("silu", "gelu_tanh"):
        backend.act_mul(torch.ones(rows, 2 * _INTERMEDIATE), activation)


def _rope(backend: CpuBackend, rows: int) -> None:
    table = torch.ones(_ROWS[-1], _HEAD_DIM // 2)
    norm = QKNorm(torch.ones(_HEAD_DIM), torch.ones(_HEAD_DIM), _EPS)
    for qk_norm in (None, norm):
        step = begin_prompt(backend, rows)
        backend.rope_and_write_kv(_qkv(rows), RopeTable(table, table), qk_norm, 0, step)


def _attention(backend: CpuBackend, rows: int) -> None:
    for window in (0, _BLOCK_SIZE):
        backend.paged_attention(_qkv(rows), 0, 1.0, window, begin_prompt(backend, rows))


def _layer_stack(backend: CpuBackend, rows: int) -> None:
    table, norm = torch.ones(_ROWS[-1], _HEAD_DIM // 2), torch.ones(_HIDDEN)
    layer = DenseLayer(
        norm, _ones(backend, (_QUERY_HEADS + 2 * _KV_HEADS) * _HEAD_DIM, _HIDDEN), None,
        _ones(backend, _HIDDEN, _QUERY_HEADS * _HEAD_DIM), norm,
        _ones(backend, 2 * _INTERMEDIATE, _HIDDEN), _ones(backend, _HIDDEN, _INTERMEDIATE),
    )  # fmt: skip
    form = LayerForm(_EPS, RopeTable(table, table), 1.0, 0, "silu", _HEAD_DIM, _KV_HEADS)
    stack = backend.layer_stack([layer], form)
    assert stack is not None
    stack.compile(torch.ones(rows, _HIDDEN), begin_prompt(backend, rows))


def _ones(backend: CpuBackend, out_features: int, in_features: int) -> Linear:
    return backend.linear(torch.ones(out_features, in_features))


def _qkv(rows: int) -> torch.Tensor:
    return torch.ones(rows, (_QUERY_HEADS + 2 * _KV_HEADS) * _HEAD_DIM)


def begin_prompt(backend: CpuBackend, rows: int) -> CpuStep:
    """A step of one prompt in the first blocks; with it begins the backend's number of threads."""
    num_blocks = -(-rows // _BLOCK_SIZE)
    return backend.begin_step(
        BatchInputs(
            token_ids=np.zeros(rows, np.int64),
            token_sources=np.full(rows, -1, np.int32),
            positions=np.arange(rows, dtype=np.int32),
            slot_mapping=np.arange(rows, dtype=np.int64),
            query_starts=np.array([0, rows], np.int32),
            context_lens=np.array([rows], np.int32),
            block_tables=np.arange(num_blocks, dtype=np.int32)[None],
            sample_rows=np.array([rows - 1], np.int64),
        )
    )
