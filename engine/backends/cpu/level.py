"""Which vector instructions the kernels are compiled for, and the switch that lowers it.

A level names what changes how kernels are written, not a processor: LLVM still tunes for the
machine at hand. ``PDMESH_CPU_LEVEL`` lowers the level for tests and benchmarks, truly: LLVM then
gets that level's features only, and torch's own kernels are held down too. Results are the same
bits at every level (``docs/performance.md`` says where that ends).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum

import llvmlite.binding as llvm

from mesh.errors import ConfigError

VARIABLE = "PDMESH_CPU_LEVEL"


class CpuLevel(StrEnum):
    """Instruction sets that kernels are written for, poorest first within an architecture."""

    GENERIC = "generic"
    """Whatever LLVM makes of plain vector code; not on x86, where it has no fused multiply-add."""
    AVX2 = "avx2"
    """With FMA and F16C, as every processor with AVX2 has them."""
    AVX_VNNI = "avx-vnni"
    """AVX2 and the byte products of VNNI, on 256-bit vectors."""
    AVX512 = "avx512"
    """F, BW, DQ, VL."""
    AVX512_VNNI = "avx512-vnni"
    NEON_DOTPROD = "neon-dotprod"
    """ARM's products of four signed bytes."""
    NEON_I8MM = "neon-i8mm"
    """Those of unsigned by signed bytes as well."""

    @property
    def multiplies_bytes(self) -> bool:
        """Whether quantised products are faster than those of float32."""
        return self is not CpuLevel.GENERIC


@dataclass(slots=True, frozen=True)
class _Target:
    """What LLVM and torch are told for a level."""

    cpu: str
    features: str
    torch_capability: str
    """ATEN_CPU_CAPABILITY."""
    onednn_isa: str
    """ONEDNN_MAX_CPU_ISA."""


_TARGETS = {
    CpuLevel.AVX2: _Target("x86-64-v3", "", "avx2", "AVX2"),
    CpuLevel.AVX_VNNI: _Target("x86-64-v3", "+avxvnni", "avx2", "AVX2_VNNI"),
    CpuLevel.AVX512: _Target("x86-64-v4", "", "avx512", "AVX512_CORE"),
    CpuLevel.AVX512_VNNI: _Target("x86-64-v4", "+avx512vnni", "avx512", "AVX512_CORE_VNNI"),
}
"""Levels that can be lowered to; on ARM the processor's own is the only one."""


def supported(features: dict[str, bool]) -> list[CpuLevel]:
    """Levels that a processor with LLVM's ``features`` has, best last; none on an x86 of before."""
    has = {name for name, present in features.items() if present}
    levels = [] if "sse2" in has else [CpuLevel.GENERIC]
    if {"avx2", "fma", "f16c"} <= has:
        levels.append(CpuLevel.AVX2)
        if "avxvnni" in has:
            levels.append(CpuLevel.AVX_VNNI)
        if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= has:
            levels.append(CpuLevel.AVX512)
            if "avx512vnni" in has:
                levels.append(CpuLevel.AVX512_VNNI)
    if "dotprod" in has:
        levels.append(CpuLevel.NEON_DOTPROD)
        if "i8mm" in has:
            levels.append(CpuLevel.NEON_I8MM)
    return levels


def host_levels() -> list[CpuLevel]:
    """Levels of this machine's processor, best last."""
    return supported(dict(llvm.get_host_cpu_features()))


def _apply() -> CpuLevel:
    """Decide this process's level; before anything is compiled.

    Raises:
        ConfigError: the variable names no level, or one that this processor lacks; or it has none.
    """
    levels = host_levels()
    if not levels:
        raise ConfigError("the CPU backend needs a processor with AVX2, FMA and F16C")
    wanted = os.environ.get(VARIABLE, "")
    if not wanted:
        return levels[-1]
    if wanted not in levels or (wanted not in _TARGETS and wanted != levels[-1]):
        raise ConfigError(f"{VARIABLE}: {wanted!r} is not one of {', '.join(levels)}")
    level = CpuLevel(wanted)
    if level in _TARGETS and level is not levels[-1]:
        target = _TARGETS[level]
        os.environ["NUMBA_CPU_NAME"] = target.cpu
        os.environ["NUMBA_CPU_FEATURES"] = target.features
        os.environ["ATEN_CPU_CAPABILITY"] = target.torch_capability
        os.environ["ONEDNN_MAX_CPU_ISA"] = target.onednn_isa
    return level


LEVEL = _apply()
"""This process's level."""
