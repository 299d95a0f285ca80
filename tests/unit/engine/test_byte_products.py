"""Each level's integer sums: the same numbers where they can run, good machine code everywhere.

LLVM compiles the tile for processors that are not here, and the innermost loop is read: it must
have the instruction that the level is named for and must not go to the stack.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.backends.cpu.byte_products import GROUP, byte_products
from engine.backends.cpu.level import CpuLevel, host_levels
from engine.backends.cpu.quantized_linear import pack, quantize_row
from engine.backends.cpu.quantized_tile import COLUMNS, emit_rows
from engine.backends.cpu.vector_ir import I64
from tests.unit.engine.quantized_format import random_matrix

RUNNABLE = sorted({CpuLevel.GENERIC, *host_levels()})
IN_FEATURES = 576
_X86, _ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
TARGETS = {
    CpuLevel.AVX2: (_X86, "x86-64-v3", ""),
    CpuLevel.AVX_VNNI: (_X86, "x86-64-v3", "+avxvnni"),
    CpuLevel.AVX512: (_X86, "x86-64-v4", ""),
    CpuLevel.AVX512_VNNI: (_X86, "x86-64-v4", "+avx512vnni"),
    CpuLevel.NEON_DOTPROD: (_ARM, "generic", "+neon,+dotprod"),
    CpuLevel.NEON_I8MM: (_ARM, "generic", "+neon,+dotprod,+i8mm"),
}
INSTRUCTIONS = {
    (CpuLevel.AVX2, 4): r"vpmaddubsw\s.*%ymm",
    (CpuLevel.AVX2, 8): r"vpmaddwd\s.*%ymm",
    (CpuLevel.AVX_VNNI, 4): r"vpdpbusd\s.*%ymm",
    (CpuLevel.AVX_VNNI, 8): r"vpdpbusd\s.*%ymm",
    (CpuLevel.AVX512, 4): r"vpmaddubsw\s.*%zmm",
    (CpuLevel.AVX512, 8): r"vpmaddwd\s.*%zmm",
    (CpuLevel.AVX512_VNNI, 4): r"vpdpbusd\s.*%zmm",
    (CpuLevel.AVX512_VNNI, 8): r"vpdpbusd\s.*%zmm",
    (CpuLevel.NEON_DOTPROD, 4): r"\bsdot\s",
    (CpuLevel.NEON_DOTPROD, 8): r"\bsdot\s",
    (CpuLevel.NEON_I8MM, 4): r"\busdot\s",
    (CpuLevel.NEON_I8MM, 8): r"\busdot\s",
}
UNROLLED = CpuLevel.AVX512_VNNI
"""Its tile was tuned on such a processor, and keeps some sums of its whole group on the stack."""
STACK = re.compile(r"\(%rsp\b|\[sp\b")


def tile_of(level: CpuLevel, bits: int) -> Any:
    """A numba function over the rows of one block of 16 columns."""
    products = byte_products(level, bits)

    @intrinsic
    def rows_of_block(
        typingctx: Any, rows: Any, a: Any, a_stride: Any, sa: Any, sum_a: Any, s_stride: Any,
        w: Any, groups: Any, c: Any, c_stride: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            emit_rows(builder, products, bits, args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), codegen

    @numba.njit
    def tile(codes: Any, scales: Any, sums: Any, weights: Any, out: Any) -> None:
        rows_of_block(
            codes.shape[0], codes.ctypes.data, codes.strides[0], scales.ctypes.data,
            sums.ctypes.data, scales.strides[0], weights.ctypes.data, weights.shape[0],
            out.ctypes.data, out.strides[0],
        )  # fmt: skip

    return tile


@pytest.mark.parametrize("bits", [8, 4])
def test_every_level_that_runs_here_gives_the_same_bits(bits: int) -> None:
    weights = pack(random_matrix(COLUMNS, IN_FEATURES, seed=31), bits)[0]
    x = random_matrix(9, IN_FEATURES, seed=32).numpy()
    x[0], x[1] = abs(x[0]) + 1e6, -abs(x[1])  # every code at its limit: the largest sums
    x[0, :] = 1.0
    found = {}
    for level in RUNNABLE:
        codes = np.empty(x.shape, byte_products(level, bits).activation_dtype)
        scales, sums = np.empty((2, len(x), IN_FEATURES // GROUP), np.float32)
        for row in range(len(x)):
            quantize_row(x[row], codes[row], scales[row], sums[row])
        tile = tile_of(level, bits)
        of_level = []
        for rows in range(1, len(x) + 1):
            out = np.full((rows, COLUMNS), np.nan, np.float32)
            tile(codes[:rows], scales[:rows], sums[:rows], weights, out)
            assert np.isfinite(out).all()
            of_level.append(out.tobytes())
        found[level] = of_level
    assert len(found) >= 2
    assert all(of_level == found[CpuLevel.GENERIC] for of_level in found.values())


def machine_code(level: CpuLevel, bits: int, rows: int) -> str:
    """Assembly of one tile of ``rows``, optimised as numba does."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple, cpu, features = TARGETS[level]
    module = ir.Module()
    module.triple = triple
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 9), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    products = replace(byte_products(level, bits), most_rows=rows)
    emit_rows(builder, products, bits, (ir.Constant(I64, rows), *function.args))
    builder.ret_void()
    compiled = llvm.parse_assembly(str(module))
    target = llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, opt=3
    )
    passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(compiled, passes)
    return str(target.emit_assembly(compiled))


def innermost_loops(assembly: str) -> list[list[str]]:
    """Instructions between a label and a jump back to it that enclose no other such label."""
    lines = assembly.splitlines()
    labels = {
        match[1]: number
        for number, line in enumerate(lines)
        if (match := re.match(r"(\.LBB\w+):", line))
    }
    spans = []
    for number, line in enumerate(lines):
        match = re.match(r"\s+[a-z][\w.]*\s.*?(\.LBB\w+)$", line)
        if match and labels.get(match[1], number) < number:
            spans.append((labels[match[1]], number))
    inner = [
        span
        for span in spans
        if not any(other != span and span[0] <= other[0] <= span[1] for other in spans)
    ]
    return [lines[first : last + 1] for first, last in inner]


@pytest.mark.parametrize(("level", "bits"), INSTRUCTIONS)
def test_the_inner_loop_has_the_levels_instruction_and_stays_in_registers(
    level: CpuLevel, bits: int
) -> None:
    products = byte_products(level, bits)
    assembly = machine_code(level, bits, products.most_rows)
    instruction = re.compile(INSTRUCTIONS[level, bits])
    loops = [
        loop for loop in innermost_loops(assembly) if any(instruction.search(line) for line in loop)
    ]
    num_loops = 2 if bits == 4 and products.rolled else 1  # low nibbles, then high ones
    assert len(loops) == num_loops, assembly
    for loop in loops:
        found = sum(bool(instruction.search(line)) for line in loop)
        assert found >= products.most_rows * COLUMNS // products.lanes
        assert level is UNROLLED or not [line for line in loop if STACK.search(line)]
