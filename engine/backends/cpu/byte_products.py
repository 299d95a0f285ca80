"""The exact integer sums of a group's products, as each level of vector instructions makes them.

A turn takes 4 consecutive k of a tile's rows: codes of 4 k for each column, and the row's 4
activations in every column. All levels give the same integers:

    level           turn                                            bounds
    avx512-vnni     vpdpbusd, unsigned codes by signed activations  exact in 32 bits
    avx-vnni        the same on 256 bits
    avx512, avx2    4 bits: vpmaddubsw                              8 pairs of <= 3,810 in 16 bits,
                            one vpmaddwd a group                    widened once
                    8 bits: even and odd bytes, vpmaddwd each       exact in 32 bits
    neon-i8mm       usdot
    neon-dotprod    sdot; 8 bits: codes - 128                       + 128 Σ a, known beforehand
    generic         32-bit multiplications
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir

from engine.backends.cpu.level import CpuLevel
from engine.backends.cpu.vector_ir import (
    I8,
    I16,
    I32,
    I64,
    LANES,
    accumulate,
    call,
    constant,
    load,
    splat,
)

GROUP = 32
"""Consecutive k that share a scale."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ByteProducts:
    """How a level multiplies; sums are vectors of ``lanes`` columns."""

    lanes: int
    most_rows: int
    """Of a tile: what the registers hold."""
    multiply: Callable[[Any, Any, Any, Any], Any]
    """(builder, sums, prepared codes, spread activations) → sums after a turn."""
    prepare: Callable[[Any, Any], Any] = lambda builder, codes: codes
    """What all rows need of 4 k's codes, an i8 vector of 4 * lanes."""
    spread: Callable[[Any, Any, int], Any]
    """(builder, address, lanes): 4 activations of a row for every column."""
    finish: Callable[[Any, Any], Any] = lambda builder, sums: sums
    """The sums of a group as i32."""
    start: Callable[[Any, Any, int], Any] | None = None
    """(builder, address of the group's activations, lanes) → sums to start from; None: zeros."""
    sum_lane: tuple[Any, int] = (I32, 1)
    """Element type of the running sums, and how many of them a column has."""
    pairs_apart: bool = False
    """Activations of a group are int16, those of even k before those of odd k; else int8."""
    rolled: bool = True
    """The group's turns are a loop: unrolled, LLVM loads all codes at once and spills."""

    @property
    def activation_dtype(self) -> type[np.int8] | type[np.int16]:
        """Of quantised activations."""
        return np.int16 if self.pairs_apart else np.int8

    @property
    def zero_sums(self) -> Any:
        """Sums of nothing."""
        element, each = self.sum_lane
        return ir.Constant(ir.VectorType(element, self.lanes * each), None)


def byte_products(level: CpuLevel, bits: int) -> ByteProducts:
    """How ``level`` multiplies unsigned codes of ``bits`` (8 or 4) by signed 8-bit activations."""
    match level:
        case CpuLevel.AVX512_VNNI:
            return ByteProducts(
                lanes=16, most_rows=12, spread=_spread_bytes, rolled=False,
                multiply=_intrinsic_dot("llvm.x86.avx512.vpdpbusd.512"),
            )  # fmt: skip
        case CpuLevel.AVX_VNNI:
            return ByteProducts(
                lanes=8, most_rows=5, spread=_spread_bytes,
                multiply=_intrinsic_dot("llvm.x86.avx512.vpdpbusd.256"),
            )  # fmt: skip
        case CpuLevel.AVX512 | CpuLevel.AVX2:
            return _multiply_add(16 if level is CpuLevel.AVX512 else 8, bits)
        case CpuLevel.NEON_I8MM:
            return ByteProducts(
                lanes=4, most_rows=4, spread=_spread_bytes,
                multiply=_intrinsic_dot("llvm.aarch64.neon.usdot.v4i32.v16i8", as_bytes=True),
            )  # fmt: skip
        case CpuLevel.NEON_DOTPROD:
            dot = _intrinsic_dot("llvm.aarch64.neon.sdot.v4i32.v16i8", as_bytes=True)
            if bits == 4:
                return ByteProducts(
                    lanes=4, most_rows=4, spread=_spread_bytes, multiply=dot
                )  # fmt: skip
            return ByteProducts(
                lanes=4, most_rows=4, spread=_spread_bytes, multiply=dot,
                prepare=_minus_128, start=_start_with_128_sums,
            )  # fmt: skip
        case CpuLevel.GENERIC:
            return ByteProducts(
                lanes=16, most_rows=4, spread=_spread_bytes, multiply=_multiply_generic
            )


def group_sums(
    builder: Any, products: ByteProducts, bits: int, codes: Any, activations: Sequence[Any]
) -> list[list[Any]]:
    """Emit one group of a tile: Σ_k activation[row, k] * code[k, column] in i32.

    Args:
        builder: LLVM's.
        products: how.
        bits: of a code.
        codes: int64 address of the group's codes (see ``quantized_tile``).
        activations: int64 address of each row's 32 activations.

    Returns:
        For each row, the 16 columns in vectors of ``products.lanes``.
    """
    parts = range(LANES // products.lanes)
    sums = []
    for row in activations:
        first = products.zero_sums
        if products.start is not None:
            first = products.start(builder, row, products.lanes)
        sums += [first for _ in parts]

    def turn(index: Any, sums: Sequence[Any], high: bool) -> list[Any]:
        """4 k, of the codes' high nibbles if ``high``."""
        prepared = []
        for part in parts:
            vector = _load_codes(builder, products, codes, index, part)
            if bits == 4:
                vector = _nibbles(builder, vector, high)
            prepared.append(products.prepare(builder, vector))
        number = builder.add(index, ir.Constant(I64, GROUP // 8 * high))
        offset = builder.mul(number, ir.Constant(I64, 4))
        following = []
        for row, address in enumerate(activations):
            spread = products.spread(builder, builder.add(address, offset), products.lanes)
            for part, ready in enumerate(prepared):
                total = sums[row * len(parts) + part]
                following.append(products.multiply(builder, total, ready, spread))
        return following

    num_turns = GROUP // 4 * bits // 8
    for high in (False, True) if bits == 4 else (False,):  # low nibbles are turns 0-3
        step = partial(turn, high=high)
        if products.rolled:
            count = ir.Constant(I64, num_turns)
            sums = list(accumulate(builder, "turns", count, sums, step, rolled=True))
        else:
            for index in range(num_turns):
                sums = step(ir.Constant(I64, index), sums)
    finished = [products.finish(builder, total) for total in sums]
    return [finished[at : at + len(parts)] for at in range(0, len(finished), len(parts))]


def _load_codes(builder: Any, products: ByteProducts, codes: Any, turn: Any, part: int) -> Any:
    kind = ir.VectorType(I8, 4 * products.lanes)
    offset = builder.mul(turn, ir.Constant(I64, 4 * LANES))
    at = builder.add(codes, builder.add(offset, ir.Constant(I64, 4 * products.lanes * part)))
    return load(builder, at, kind, 1)


def _nibbles(builder: Any, packed: Any, high: bool) -> Any:
    """Low or high 4 bits of each byte. x86 shifts no bytes: shift words, then mask."""
    kind = packed.type
    if high:
        words = ir.VectorType(I16, kind.count // 2)
        shifted = builder.lshr(builder.bitcast(packed, words), constant(words, 4))
        packed = builder.bitcast(shifted, kind)
    return builder.and_(packed, constant(kind, 15))


def _spread_bytes(builder: Any, address: Any, lanes: int) -> Any:
    return splat(builder, load(builder, address, I32, 4), ir.VectorType(I32, lanes))


def _intrinsic_dot(name: str, *, as_bytes: bool = False) -> Callable[[Any, Any, Any, Any], Any]:
    """An instruction that adds four products to each lane: on x86 it takes its bytes as i32."""

    def multiply(builder: Any, sums: Any, codes: Any, spread: Any) -> Any:
        kind = codes.type if as_bytes else sums.type
        left, right = builder.bitcast(codes, kind), builder.bitcast(spread, kind)
        return call(builder, name, sums.type, sums, left, right)

    return multiply


def _multiply_add(lanes: int, bits: int) -> ByteProducts:
    """AVX2's instructions, on vectors of 256 or 512 bits."""
    to_words, to_ints = {
        8: ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
        16: ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
    }[lanes]
    words, ints = ir.VectorType(I16, 2 * lanes), ir.VectorType(I32, lanes)

    def multiply_nibbles(builder: Any, sums: Any, codes: Any, spread: Any) -> Any:
        pairs = call(builder, to_words, words, codes, builder.bitcast(spread, codes.type))
        return builder.add(sums, pairs)

    def widen(builder: Any, sums: Any) -> Any:
        return call(builder, to_ints, ints, sums, constant(words, 1))

    def even_and_odd(builder: Any, codes: Any) -> Any:
        both = builder.bitcast(codes, words)
        even = builder.and_(both, constant(words, 255))
        return even, builder.lshr(both, constant(words, 8))

    def spread_pairs(builder: Any, address: Any, lanes: int) -> Any:
        second = builder.add(address, ir.Constant(I64, GROUP))
        pairs = (_spread_bytes(builder, at, lanes) for at in (address, second))
        return [builder.bitcast(pair, words) for pair in pairs]

    def multiply_bytes(builder: Any, sums: Any, codes: Any, spread: Any) -> Any:
        products = [
            call(builder, to_ints, ints, left, right)
            for left, right in zip(codes, spread, strict=True)
        ]
        return builder.add(sums, builder.add(*products))

    if bits == 4:
        return ByteProducts(
            lanes=lanes, most_rows=5 if lanes == 8 else 8,
            spread=_spread_bytes, multiply=multiply_nibbles, finish=widen, sum_lane=(I16, 2),
        )  # fmt: skip
    return ByteProducts(
        lanes=lanes, most_rows=4 if lanes == 8 else 8,
        prepare=even_and_odd, spread=spread_pairs, multiply=multiply_bytes, pairs_apart=True,
    )  # fmt: skip


def _minus_128(builder: Any, codes: Any) -> Any:
    return builder.xor(codes, constant(codes.type, 128))


def _start_with_128_sums(builder: Any, address: Any, lanes: int) -> Any:
    """128 times the sum of a row's 32 activations, in every lane."""
    kind, total = ir.VectorType(I8, 16), ir.Constant(ir.VectorType(I32, 4), None)
    ones = constant(kind, 1)
    for offset in (0, 16):
        bytes_ = load(builder, builder.add(address, ir.Constant(I64, offset)), kind, 1)
        total = call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", total.type, total, bytes_, ones)
    whole = call(builder, "llvm.vector.reduce.add.v4i32", I32, total)
    shifted = builder.shl(whole, ir.Constant(I32, 7))
    return splat(builder, shifted, ir.VectorType(I32, lanes))


def _multiply_generic(builder: Any, sums: Any, codes: Any, spread: Any) -> Any:
    wide = ir.VectorType(I32, codes.type.count)
    left = builder.zext(codes, wide)
    right = builder.sext(builder.bitcast(spread, codes.type), wide)
    products = builder.mul(left, right)
    undefined = ir.Constant(wide, ir.Undefined)
    for first in range(4):
        every = ir.Constant(sums.type, list(range(first, codes.type.count, 4)))
        sums = builder.add(sums, builder.shuffle_vector(products, undefined, every))
    return sums
