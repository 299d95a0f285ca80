"""All layers of a plain decoder, kernel after kernel, without a return to Python in between.

A decode step of a small model makes some 250 calls of kernels of 5 to 50 µs; made from Python, with
a tensor allocated and arrays handed over for each, they cost as much again. Here one compiled loop
makes them, by the addresses of the compiled kernels: the same machine code as of the backend's
single ops, hence the same bits, and nothing compiled twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
import torch

from engine.backend import DenseLayer, LayerForm
from engine.backends.cpu import elementwise
from engine.backends.cpu.attention import CpuStep, paged_attention
from engine.backends.cpu.elementwise import address
from engine.backends.cpu.float32_linear import Float32Linear, blocks_together
from engine.backends.cpu.kv_store import KVView
from engine.backends.cpu.layer_loop import run_layers
from engine.backends.cpu.quantized_linear import QuantizedLinear
from engine.backends.cpu.vector_ir import LANES
from engine.backends.cpu.workspace import Workspace

CpuLinear = QuantizedLinear | Float32Linear
_LINE = 16
"""Floats of a cache line."""
_NO_NORM = np.empty(0, np.float32)


class CpuLayerStack:
    """Implements ``engine.backend.LayerStack``. Borrows the weights and the KV cache."""

    def __init__(
        self,
        layers: Sequence[DenseLayer],
        form: LayerForm,
        view: Callable[[], KVView],
        workspace: Workspace,
    ) -> None:
        """Note where everything lies; ``layers`` must be what ``is_plain`` says yes to.

        Args:
            layers: Their tensors must stay where they are.
            form: What the layers have in common.
            view: The KV cache, once there is one.
            workspace: Of the products.
        """
        self._layers, self._form, self._view, self._workspace = layers, form, view, workspace
        self._table = np.array([_row(layer) for layer in layers], np.int64)
        first = layers[0]
        products = [x for layer in layers for x in _products(layer)]
        self._product_kernel = products[0].kernel
        self._scratch_bytes_per_row = max(
            (x.scratch_bytes_per_row for x in products if isinstance(x, QuantizedLinear)), default=0
        )
        width, dim = products[0].out_features, form.head_dim
        self._num_heads = width // dim - 2 * form.num_kv_heads
        self._sizes = (
            len(first.attention_norm), width, self._num_heads * dim,
            products[2].out_features // 2, dim,
        )  # fmt: skip
        self._activations = torch.empty(0)
        self._entries: dict[Any, int] = {}
        """By kernel."""

    def run(
        self,
        residual: torch.Tensor,
        step: CpuStep,
        on_kv_written: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """See LayerStack; what is returned is overwritten by the next call."""
        arguments, branch = self._arguments(residual, step, self._entry)
        if on_kv_written is None:
            run_layers(0, len(self._layers), *arguments)
            return branch
        for layer in range(len(self._layers)):
            run_layers(layer, layer + 1, *arguments)
            on_kv_written(layer)
        return branch

    def compile(self, residual: torch.Tensor, step: CpuStep) -> None:
        """Compile the loop alone; the kernels that it calls are compiled by whoever calls them."""
        arguments, _ = self._arguments(residual, step, lambda kernel, *values: 0)
        run_layers.compile(_types(0, 1, *arguments))

    def _arguments(
        self, residual: torch.Tensor, step: CpuStep, entry: Callable[..., int]
    ) -> tuple[tuple[Any, ...], torch.Tensor]:
        """Those of ``run_layers`` after the layers, and the tensor that the branch is."""
        form, kv = self._form, self._view()
        batch, tiles, rows = step.batch, step.tiles, len(residual)
        size, width, attended_width, gated_width, _ = self._sizes
        hidden, branch, qkv, attended, gate_up, gated = self._buffers(
            rows, (size, size, width, attended_width, 2 * gated_width, gated_width)
        )
        threads, scratch = self._workspace.num_threads, self._scratch(rows)
        eps, gelu = np.float32(form.eps), form.activation == "gelu_tanh"
        first = self._layers[0]
        of_heads = (
            qkv.numpy(), batch.positions, batch.slot_mapping,
            form.rope.cos.numpy(), form.rope.sin.numpy(),
        )  # fmt: skip
        qk_eps = np.float32(first.qk_norm.eps if first.qk_norm is not None else 0.0)
        cache = (kv.keys, kv.values, kv.scales)
        of_tiles = (
            batch.block_tables, tiles.sequence, tiles.first_row, tiles.num_tokens,
            tiles.first_position, tiles.thread_bounds, np.float32(form.scale), form.window,
        )  # fmt: skip
        out = attended.numpy()
        kernels = (
            entry(elementwise.RMS_NORM.of(rows * size), 0, 0, rows, size, eps, 0),
            entry(elementwise.ADD_RMS_NORM.of(rows * size), 0, 0, 0, rows, size, eps, 0),
            entry(elementwise.ACT_MUL.of(rows * gated_width), 0, gelu, rows, gated_width, 0),
            entry(
                elementwise.ROPE_WRITE.of(rows * width),
                *of_heads, _NO_NORM, _NO_NORM, qk_eps, *cache, 0, self._num_heads,
            ),
            entry(paged_attention, of_heads[0], *cache, 0, *of_tiles, out),
            entry(self._product_kernel, 0, rows, size, 0, 0, 0, 0, threads),
        )  # fmt: skip
        buffers = (
            *map(address, (residual, hidden, branch, qkv, attended, gate_up, gated)), scratch,
        )  # fmt: skip
        return (
            self._table, kernels, rows, self._sizes, buffers, eps, gelu, threads, of_heads[0], out,
            *of_heads[1:], qk_eps, *cache, *of_tiles, self._num_heads,
        ), branch  # fmt: skip

    def _buffers(self, rows: int, widths: Sequence[int]) -> list[torch.Tensor]:
        """[rows, width] float32 each, in one piece of memory that is kept for the next step."""
        counts = [-(-rows * width // _LINE) * _LINE for width in widths]
        if len(self._activations) < sum(counts):
            self._activations = torch.empty(sum(counts))
        parts = torch.split(self._activations[: sum(counts)], counts)
        return [
            part[: rows * width].view(rows, width)
            for part, width in zip(parts, widths, strict=True)
        ]

    def _scratch(self, rows: int) -> int:
        """The products' one argument that depends on their kind."""
        if self._scratch_bytes_per_row:
            return self._workspace.reserve(rows * self._scratch_bytes_per_row)
        return blocks_together(rows)

    def _entry(self, kernel: Any, *arguments: Any) -> int:
        """Where a kernel's code for arguments of these types begins; compiled if it is not yet."""
        if kernel not in self._entries:
            kinds = _types(*arguments)
            kernel.compile(kinds)
            compiled = kernel.overloads[kinds]
            self._entries[kernel] = compiled.library.get_pointer_to_function(
                compiled.fndesc.llvm_func_name
            )
        return self._entries[kernel]


def _types(*arguments: Any) -> tuple[Any, ...]:
    """What numba compiles for."""
    return tuple(map(numba.typeof, arguments))


def is_plain(layers: Sequence[DenseLayer]) -> bool:
    """Whether every product is of one kind, without columns that only fill its last block."""
    kernels = set()
    for layer in layers:
        products = _products(layer)
        if (
            len(products) < 4
            or any(x.out_features % LANES for x in products)
            or any(x.bias is not None for x in products[2:])
        ):
            return False
        kernels |= {x.kernel for x in products}
    return len(kernels) == 1


def _products(layer: DenseLayer) -> list[CpuLinear]:
    """A layer's four, unless something else is in their place."""
    linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
    return [x for x in linears if isinstance(x, CpuLinear)]


def _row(layer: DenseLayer) -> list[int]:
    """A layer's row of the table."""
    norm = layer.qk_norm
    of_heads = (0, 0) if norm is None else (address(norm.q), address(norm.k))
    row = [address(layer.attention_norm), address(layer.mlp_norm), *of_heads]
    for product in _products(layer):
        bias = 0 if product.bias is None else address(product.bias)
        row += [product.packed_address, product.num_blocks, bias]
    return row
