"""What ``engine.backends.gpu.tune`` measures for products with packed weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.backends.gpu.kernels.linear.packed_matmul import SplitWorkspace, packed_matmul
from engine.backends.gpu.kernels.linear.packed_weights import WORDS, unit_of
from engine.backends.gpu.tuning import Condition, LaunchConfig
from engine.backends.gpu.tuning_case import TuningCase


def _configs(
    block_m: int, *shapes: tuple[int, int], stages: tuple[int, ...], per_sm: tuple[int, ...]
) -> list[LaunchConfig]:
    """Of every (BLOCK_N, warps), stages and programs per multiprocessor (0: K is not split)."""
    return [
        LaunchConfig(
            meta={
                "BLOCK_M": block_m,
                "BLOCK_N": block_n,
                "TILE_GROUP": 1 if programs else 8,
                **({"PROGRAMS_PER_SM": programs} if programs else {}),
            },
            num_warps=num_warps,
            num_stages=num_stages,
        )
        for block_n, num_warps in shapes
        for num_stages in stages
        for programs in per_sm
    ]


_CANDIDATES = [
    (1, 8, _configs(8, (64, 4), (128, 4), (256, 8), stages=(4, 6), per_sm=(2, 3, 4, 6))),
    (9, 16, _configs(16, (64, 4), (128, 4), (256, 8), stages=(4, 6), per_sm=(2, 3, 4))),
    (17, 64, _configs(64, (64, 4), (128, 8), stages=(3, 4, 5), per_sm=(1, 2))),
    (
        65,
        1 << 30,
        _configs(64, (128, 4), (128, 8), stages=(3, 4), per_sm=(0,))
        + _configs(128, (128, 8), (256, 8), stages=(3, 4), per_sm=(0,)),
    ),
]
"""(fewest tokens, most, configurations to measure)"""


def packed_tuning_cases(
    kernel: str, device: torch.device, *, bits: int, group: int, num_outputs: int, size: int
) -> Iterator[TuningCase]:
    """Few, some and many tokens, of the weights of an MLP's first matrix."""
    words = torch.randint(
        -(1 << 31), 1 << 31, (size // unit_of(bits), num_outputs, WORDS), device=device
    ).to(torch.int32)
    rows = (size // group, num_outputs) if group else (num_outputs,)
    scales = torch.rand(rows, device=device).to(torch.float16 if group else torch.float32)
    workspace = SplitWorkspace.allocate(device)
    for first, last, candidates in _CANDIDATES:
        x = torch.randn(min(last, 2048), size, device=device).to(torch.bfloat16)
        out = torch.empty(len(x), num_outputs, dtype=x.dtype, device=device)

        def launch(config: LaunchConfig, x: torch.Tensor = x, out: torch.Tensor = out) -> None:
            packed_matmul(
                x, words, scales, None,
                bits=bits, group=group, out=out, workspace=workspace, config=config,
            )  # fmt: skip

        when: dict[str, Condition] = {"m": (first, last)}
        if group:
            when["group"] = group
        whens = tuple({**when, "dtype": dtype} for dtype in ("bf16", "fp16"))
        yield TuningCase(kernel=kernel, whens=whens, candidates=candidates, launch=launch)
