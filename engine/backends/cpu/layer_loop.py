"""The compiled loop over a model's layers, see ``layer_stack``."""

from __future__ import annotations

from typing import Any

import numba
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.backends.cpu.intrinsics import inner, matrix

# Columns of the table: one layer's addresses and sizes, in int64.
_ATTENTION_NORM, _MLP_NORM, _Q_NORM, _K_NORM = range(4)
_QKV, _OUTPUT, _GATE_UP, _DOWN = range(4, 16, 3)
"""Of a product: its packed weights, their blocks of 16 columns, its bias (0: none)."""


@intrinsic
def _call(typingctx: Any, kernel: Any, arguments: Any) -> Any:
    """Call the compiled kernel at an address; the types of the tuple must be those of its own."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        convention, kinds = context.call_conv, tuple(arguments.types)
        kind = convention.get_function_type(types.none, kinds)
        callee = builder.inttoptr(values[0], kind.as_pointer())
        items = cgutils.unpack_tuple(builder, values[1], len(kinds))
        convention.call_function(builder, callee, types.none, kinds, items)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), codegen


@inner
def _add_bias(out: Any, rows: Any, columns: Any, bias: Any) -> None:
    if bias != 0:
        out_rows, added = matrix(out, rows, columns), matrix(bias, 1, columns)[0]
        for t in range(rows):
            row = out_rows[t]
            for i in range(columns):
                row[i] += added[i]


@numba.njit(nogil=True, cache=True, boundscheck=False)
def run_layers(
    first: Any, last: Any, table: Any, kernels: Any, rows: Any, sizes: Any, buffers: Any,
    eps: Any, gelu: Any, threads: Any, qkv_rows: Any, attended_rows: Any, positions: Any,
    slots: Any, cos: Any, sin: Any, qk_eps: Any, keys: Any, values: Any, scales: Any,
    block_tables: Any, tile_sequence: Any, tile_row: Any, tile_tokens: Any, tile_position: Any,
    bounds: Any, scale: Any, window: Any, num_heads: Any,
) -> None:  # fmt: skip
    """Layers ``first`` … ``last - 1``; what they leave for the next is in residual and branch."""
    norm, add_norm, act, rope, attention, product = kernels
    size, width, attended_width, gated_width, dim = sizes
    residual, hidden, branch, qkv, attended, gate_up, gated, scratch = buffers
    for layer in range(first, last):
        row = table[layer]
        if layer == 0:
            _call(norm, (residual, row[_ATTENTION_NORM], rows, size, eps, hidden))
        else:
            weight = row[_ATTENTION_NORM]
            _call(add_norm, (branch, residual, weight, rows, size, eps, hidden))
        _call(
            product,
            (hidden, rows, size, row[_QKV], row[_QKV + 1], scratch, qkv, threads),
        )
        _add_bias(qkv, rows, width, row[_QKV + 2])
        q_norm = matrix(row[_Q_NORM], 1, dim if row[_Q_NORM] != 0 else 0)[0]
        k_norm = matrix(row[_K_NORM], 1, dim if row[_K_NORM] != 0 else 0)[0]
        _call(
            rope,
            (
                qkv_rows, positions, slots, cos, sin, q_norm, k_norm, qk_eps,
                keys, values, scales, layer, num_heads,
            ),
        )  # fmt: skip
        _call(
            attention,
            (
                qkv_rows, keys, values, scales, layer, block_tables, tile_sequence, tile_row,
                tile_tokens, tile_position, bounds, scale, window, attended_rows,
            ),
        )  # fmt: skip
        _call(
            product,
            (
                attended, rows, attended_width, row[_OUTPUT], row[_OUTPUT + 1], scratch, branch,
                threads,
            ),
        )  # fmt: skip
        _add_bias(branch, rows, size, row[_OUTPUT + 2])
        _call(add_norm, (branch, residual, row[_MLP_NORM], rows, size, eps, hidden))
        _call(
            product,
            (hidden, rows, size, row[_GATE_UP], row[_GATE_UP + 1], scratch, gate_up, threads),
        )
        _call(act, (gate_up, gelu, rows, gated_width, gated))
        _call(
            product,
            (gated, rows, gated_width, row[_DOWN], row[_DOWN + 1], scratch, branch, threads),
        )
