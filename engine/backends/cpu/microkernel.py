"""The inner tile of every float32 product: C[6, 16] += A[6, K] · B[K, 16] in vector registers.

Emitted as LLVM vector IR, which numba compiles for the machine at hand: one AVX-512 register or two
AVX2 / four NEON ones per row of C. Written by hand because LLVM does not keep the accumulators of
the equivalent loop nest in registers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

TILE_ROWS = 6
"""Rows of C per call: 6 x 16 floats are 12 of AVX2's 16 registers."""
TILE_COLUMNS = 16

_F32 = ir.FloatType()
_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(_F32, TILE_COLUMNS)


def _float_pointer(builder: Any, address: Any, offset: Any) -> Any:
    byte_offset = builder.mul(offset, ir.Constant(_I64, 4))
    return builder.inttoptr(builder.add(address, byte_offset), _F32.as_pointer())


def _load_vector(builder: Any, address: Any, offset: Any) -> Any:
    pointer = builder.bitcast(_float_pointer(builder, address, offset), _VECTOR.as_pointer())
    return builder.load(pointer, align=4)


def _splat(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), TILE_COLUMNS), [0] * TILE_COLUMNS)
    return builder.shuffle_vector(one, undefined, mask)


@intrinsic
def fma_tile(
    typingctx: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, c: Any, c_stride: Any, k: Any
) -> Any:
    """C[6, 16] += A[6, k] · B[k, 16], all float32.

    ``a``, ``b``, ``c`` are int64 addresses (``array.ctypes.data`` plus a byte offset); strides are
    row strides in elements; ``k`` ≥ 1. All six rows of A and C must be addressable.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, a_stride, b, b_stride, c, c_stride, k = args
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_VECTOR, (_VECTOR,) * 3), f"llvm.fma.v{TILE_COLUMNS}f32"
        )
        rows = [ir.Constant(_I64, row) for row in range(TILE_ROWS)]
        c_offsets = [builder.mul(row, c_stride) for row in rows]
        a_offsets = [builder.mul(row, a_stride) for row in rows]
        initial = [_load_vector(builder, c, offset) for offset in c_offsets]
        before = builder.basic_block
        loop = builder.append_basic_block("fma.loop")
        after = builder.append_basic_block("fma.after")
        builder.branch(loop)

        builder.position_at_end(loop)
        index = builder.phi(_I64)
        index.add_incoming(ir.Constant(_I64, 0), before)
        accumulators = []
        for value in initial:
            phi = builder.phi(_VECTOR)
            phi.add_incoming(value, before)
            accumulators.append(phi)
        b_row = _load_vector(builder, b, builder.mul(index, b_stride))
        results = []
        for phi, offset in zip(accumulators, a_offsets, strict=True):
            scalar = builder.load(_float_pointer(builder, a, builder.add(offset, index)), align=4)
            results.append(builder.call(fma, (_splat(builder, scalar), b_row, phi)))
        following = builder.add(index, ir.Constant(_I64, 1))
        index.add_incoming(following, loop)
        for phi, value in zip(accumulators, results, strict=True):
            phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", following, k), loop, after)

        builder.position_at_end(after)
        for value, offset in zip(results, c_offsets, strict=True):
            pointer = builder.bitcast(_float_pointer(builder, c, offset), _VECTOR.as_pointer())
            builder.store(value, pointer, align=4)
        return context.get_dummy_value()

    address = types.int64
    return types.void(address, address, address, address, address, address, address), codegen
