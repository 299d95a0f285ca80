"""Kernels that compile_check must refuse."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from engine.backends.gpu.variant import Variant


@triton.jit
def square_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """``out += x @ x`` over [size, BLOCK, BLOCK]; a load of the next x while this one is used."""
    offsets = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for index in range(size):
        x = tl.load(x_ptr + index * BLOCK * BLOCK + offsets)
        total += tl.dot(x, x)
    tl.store(out_ptr + offsets, total)


def variants() -> list[Variant]:
    """One that is sound, and one for every fault."""
    return [
        _variant("sound", 64, num_warps=4, num_stages=2),
        _variant("too few threads", 128, num_warps=1, num_stages=1),
        _variant("too many stages", 128, num_warps=8, num_stages=9),
        _variant("not a size", 48, num_warps=4, num_stages=2),
        _variant("no type of out", 64, num_warps=4, num_stages=2, out_ptr=None),
    ]


def _variant(name: str, block: int, **options: Any) -> Variant:
    signature = {"x_ptr": "*bf16:16", "out_ptr": "*fp32:16", "size": "i32"}
    if "out_ptr" in options:
        options.pop("out_ptr")
        del signature["out_ptr"]
    return Variant(
        name=name, fn=square_kernel, signature=signature, constexprs={"BLOCK": block}, **options
    )
