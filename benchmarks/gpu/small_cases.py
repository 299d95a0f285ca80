"""Norms, activations and the choice of tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.case import Case, poisoned, relative_error
from engine.backends.gpu.backend import ACTIVATIONS
from engine.backends.gpu.kernels import act_mul, rms_norm
from engine.backends.gpu.kernels.sampling import sample, take_tokens
from engine.backends.gpu.kernels.sampling.sample_workspace import CHUNK, MAX_CHUNKS, SampleWorkspace
from engine.model_config import HiddenAct

_BOUNDS = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 1e-2}
_EPS = 1e-6


def checks(device: torch.device) -> Iterator[Case]:
    """Small inputs of every kind."""
    for activation in ("bf16", "fp16", "fp32"):
        for rows, width in ((1, 64), (5, 96), (3, 1000)):
            yield norm_case(device, rows, width, activation, add=False)
            yield norm_case(device, rows, width, activation, add=True)
            yield act_case(device, rows, width, activation, "silu")
            yield act_case(device, rows, width, activation, "gelu_tanh")
    yield take_case(device, 300)
    yield sample_case(device, 6, 5000, is_cut=True)
    yield sample_case(device, 6, 300, is_cut=False)


def timed(device: torch.device) -> Iterator[Case]:
    """Of an 8B model: a decode step's rows and a prefill step's."""
    for rows in (32, 4096):
        yield norm_case(device, rows, 4096, "bf16", add=True)
        yield act_case(device, rows, 14336, "bf16", "silu")
    yield sample_case(device, 32, 128256, is_cut=False)
    yield sample_case(device, 32, 128256, is_cut=True)


def norm_case(device: torch.device, rows: int, width: int, activation: str, *, add: bool) -> Case:
    """With ``add`` the residual's new value is checked through its norm."""
    dtype = ACTIVATIONS[activation]
    x, original = (_random(device, rows, width, seed=seed).to(dtype) for seed in (1, 2))
    weight = _random(device, width, seed=3)
    residual = original.clone()
    out = poisoned(rows, width, dtype=dtype, device=device)

    def run() -> torch.Tensor:
        if add:
            residual.copy_(original)
            return rms_norm.add_rms_norm(x, residual, weight, _EPS, out=out)
        return rms_norm.rms_norm(x, weight, _EPS, out=out)

    def expected() -> torch.Tensor:
        if not add:
            return rms_norm.reference(x.double(), None, weight.double(), _EPS)
        total = (original.double() + x.double()).to(dtype).double()  # as it is stored
        return rms_norm.reference(total, None, weight.double(), _EPS)

    return Case(
        kernel="rms_norm", inputs=f"{rows} x {width} {activation}{', add and a copy' * add}",
        run=run, error=relative_error(run, expected), bound=_BOUNDS[activation],
        num_bytes=x.nbytes * (6 if add else 2),
    )  # fmt: skip


def act_case(
    device: torch.device, rows: int, width: int, activation: str, function: HiddenAct
) -> Case:
    """``function(gate) * up``."""
    dtype = ACTIVATIONS[activation]
    gate_up = _random(device, rows, 2 * width, seed=4).to(dtype)
    out = poisoned(rows, width, dtype=dtype, device=device)

    def run() -> torch.Tensor:
        return act_mul.act_mul(gate_up, function, out=out)

    def expected() -> torch.Tensor:
        return act_mul.reference(gate_up.double(), function)

    return Case(
        kernel="act_mul", inputs=f"{rows} x {width} {activation} {function}",
        run=run, error=relative_error(run, expected),
        bound=_BOUNDS[activation], num_bytes=gate_up.nbytes + out.nbytes,
    )  # fmt: skip


def take_case(device: torch.device, num_tokens: int) -> Case:
    """Pending tokens."""
    generator = torch.Generator(device).manual_seed(5)
    drawn = torch.randint(0, 99, (8,), generator=generator, device=device, dtype=torch.int32)
    sources = torch.randint(-1, 8, (num_tokens,), generator=generator, device=device)
    sources = sources.to(torch.int32)
    original = torch.randint(0, 99, (num_tokens,), generator=generator, device=device)
    token_ids = original.clone()

    def run() -> torch.Tensor:
        token_ids.copy_(original)
        take_tokens.take_tokens(token_ids, sources, drawn)
        return token_ids

    def expected() -> torch.Tensor:
        return take_tokens.reference(original, sources, drawn).double()

    return Case(
        kernel="take_tokens", inputs=f"{num_tokens} tokens", run=run, bound=0.0,
        error=relative_error(run, expected),
        num_bytes=original.nbytes * 4,
    )  # fmt: skip


def sample_case(device: torch.device, rows: int, vocabulary: int, *, is_cut: bool) -> Case:
    """A drawn token's own interval of the distribution function must hold the row's number."""
    logits = _random(device, rows, vocabulary, seed=6) * 3
    temperature = torch.linspace(0.0, 1.2, rows, device=device)
    top_k = torch.full((rows,), 40 if is_cut else 0, dtype=torch.int32, device=device)
    top_p = torch.full((rows,), 0.9 if is_cut else 1.0, device=device)
    min_p = torch.zeros(rows, device=device)
    numbers = torch.rand(rows, generator=torch.Generator(device).manual_seed(7), device=device)
    drawn = torch.full((rows,), -1, dtype=torch.int32, device=device)
    workspace = SampleWorkspace.allocate(
        device, max_rows=rows, vocabulary=vocabulary, chunk=max(CHUNK, vocabulary // MAX_CHUNKS)
    )

    def draw() -> torch.Tensor:
        return sample.sample(
            logits, temperature, top_k, top_p, min_p, numbers, out=drawn, workspace=workspace,
            use_top_k=is_cut, use_top_p=is_cut,
        )  # fmt: skip

    def distance() -> float:
        """By how much of the mass a number misses the interval of the token that it drew."""
        weights = sample.reference(
            logits.cpu(), temperature.cpu(), top_k.cpu(), top_p.cpu(), min_p.cpu()
        )
        upper = (weights.cumsum(1) / weights.sum(1, keepdim=True)).double()
        token = draw().long().cpu()[:, None]
        high = upper.gather(1, token)[:, 0]
        share = weights.gather(1, token)[:, 0] / weights.sum(1)
        wanted = numbers.double().cpu()
        missed = torch.maximum(wanted - high, high - share - wanted).clamp(min=0)
        return float(torch.where(share > 0, missed, 1.0).max())

    return Case(
        kernel="sample", inputs=f"{rows} x {vocabulary}{', top-k and top-p' * is_cut}",
        run=draw, error=distance, bound=1e-5,
        num_bytes=logits.nbytes,
    )  # fmt: skip


def _random(device: torch.device, *shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device)
