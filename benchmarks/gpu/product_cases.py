"""Products with quantised weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.case import Case, poisoned, relative_error
from engine.backends.gpu.backend import ACTIVATIONS
from engine.backends.gpu.kernels.linear import int4_matmul as int4
from engine.backends.gpu.kernels.linear import int8_matmul as int8
from engine.backends.gpu.kernels.linear import int8_matmul_dynamic as dynamic
from engine.backends.gpu.kernels.linear.packed_matmul import SplitWorkspace
from engine.backends.gpu.kernels.linear.packed_weights import pack

_BOUNDS = {"fp32": 2e-5, "fp16": 2e-3, "bf16": 1e-2}
_GROUP = 128


def checks(device: torch.device) -> Iterator[Case]:
    """Small shapes, whole tiles and not, few tokens and many."""
    for activation in ("bf16", "fp16", "fp32"):
        for m in (1, 7, 16, 40):
            yield packed_case(device, 4, m, 96, 256, activation=activation)
            yield packed_case(device, 8, m, 72, 160, activation=activation)
    for m in (1, 16, 40):
        yield dynamic_case(device, m, 72, 160)


def timed(device: torch.device) -> Iterator[Case]:
    """The widest layer of an 8B model."""
    for m, target in ((1, 0.75), (16, 0.0), (512, 0.0), (4096, 0.0)):
        yield packed_case(device, 4, m, 28672, 4096, target=target)
    for m in (1, 16, 512):
        yield packed_case(device, 8, m, 28672, 4096)
    for m in (16, 512, 4096):
        yield dynamic_case(device, m, 28672, 4096)


def packed_case(
    device: torch.device, bits: int, m: int, n: int, k: int, *, activation: str = "bf16",
    target: float = 0.0,
) -> Case:  # fmt: skip
    """Weights of 4 or 8 bits, activations as they are."""
    x, weight = _inputs(device, m, n, k, activation)
    group = _GROUP if k % _GROUP == 0 else 32
    values, scales = int4.quantise(weight, group) if bits == 4 else int8.quantise(weight)
    words = pack(values, bits)
    product = int4.int4_matmul if bits == 4 else int8.int8_matmul
    reference = int4.reference if bits == 4 else int8.reference
    out = poisoned(m, n, dtype=x.dtype, device=device)
    workspace = SplitWorkspace.allocate(device)

    def run() -> torch.Tensor:
        return product(x, words, scales, None, out=out, workspace=workspace)

    def expected() -> torch.Tensor:
        return reference(x.double(), words, scales, None)

    return Case(
        kernel=f"int{bits}_matmul", inputs=f"m {m}, n {n}, k {k}, {activation}",
        run=run, error=relative_error(run, expected), bound=_BOUNDS[activation],
        num_bytes=words.nbytes + scales.nbytes + x.nbytes + out.nbytes,
        num_flops=2 * m * n * k, target=target,
    )  # fmt: skip


def dynamic_case(device: torch.device, m: int, n: int, k: int) -> Case:
    """Weights and activations of 8 bits."""
    x, weight = _inputs(device, m, n, k, "bf16")
    values, scales = int8.quantise(weight)
    words = pack(values, 8)
    out = poisoned(m, n, dtype=x.dtype, device=device)
    tokens = dynamic.QuantisedTokens.allocate(device, m, k)

    def run() -> torch.Tensor:
        return dynamic.int8_matmul_dynamic(x, words, scales, None, out=out, tokens=tokens)

    def expected() -> torch.Tensor:
        return dynamic.reference(tokens, m, words, scales, None, k)

    return Case(
        kernel="int8_matmul_dynamic", inputs=f"m {m}, n {n}, k {k}, bf16",
        run=run, error=relative_error(run, expected), bound=_BOUNDS["bf16"],
        num_bytes=words.nbytes + scales.nbytes + x.nbytes + out.nbytes,
        num_flops=2 * m * n * k,
    )  # fmt: skip


def _inputs(
    device: torch.device, m: int, n: int, k: int, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(m + n + k)
    x = torch.randn(m, k, generator=generator, device=device).to(ACTIVATIONS[activation])
    return x, torch.randn(n, k, generator=generator, device=device)
