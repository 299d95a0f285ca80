"""Attention over a paged cache, and the write into it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.case import Case, poisoned, relative_error
from engine.backend import KVCacheSpec, KVDtype
from engine.backends.gpu.backend import ACTIVATIONS
from engine.backends.gpu.kernels.attention import paged_decode as decode
from engine.backends.gpu.kernels.attention import rope_kv_write as rope
from engine.backends.gpu.kernels.attention import varlen_prefill as prefill
from engine.backends.gpu.kv_view import kv_view

_BOUNDS = {"fp32": 2e-5, "fp16": 2e-3, "bf16": 1.6e-2}
Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@dataclass(slots=True, frozen=True, kw_only=True)
class Geometry:
    """Of one model's attention."""

    activation: str = "bf16"
    kv: KVDtype = "bf16"
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0

    def describe(self) -> str:
        """For the table."""
        extra = f" window {self.window}" if self.window else ""
        extra += f" cap {self.softcap:g}" if self.softcap else ""
        return (
            f"{self.activation}/{self.kv} {self.num_q_heads}:{self.num_kv_heads} heads "
            f"d{self.head_dim} b{self.block_size}{extra}"
        )


def checks(device: torch.device) -> Iterator[Case]:
    """Small inputs of every kind."""
    ragged = (0, 1, 15, 16, 17, 70)
    kinds = [
        Geometry(num_q_heads=8, num_kv_heads=2, head_dim=64),
        Geometry(num_q_heads=4, num_kv_heads=4, head_dim=128, block_size=32),
        Geometry(num_q_heads=8, num_kv_heads=1, head_dim=64, kv="int8"),
        Geometry(activation="fp16", kv="fp16", num_q_heads=6, num_kv_heads=2, head_dim=64),
        Geometry(activation="fp32", kv="fp32", num_q_heads=4, num_kv_heads=2, head_dim=64),
        Geometry(num_q_heads=4, num_kv_heads=2, head_dim=64, window=20),
        Geometry(num_q_heads=4, num_kv_heads=2, head_dim=64, softcap=15.0),
    ]
    for kind in kinds:
        yield decode_case(device, kind, ragged, num_splits=1)
        yield decode_case(device, kind, (300, 1, 130), num_splits=3)
        yield prefill_case(device, kind, [(0, 1), (0, 33), (40, 17), (16, 16)])
        yield write_case(device, kind, 19)


def timed(device: torch.device) -> Iterator[Case]:
    """What a decode or prefill worker spends its time on."""
    yield decode_case(device, Geometry(), [8192] * 32, target=0.85)
    yield decode_case(device, Geometry(kv="int8"), [8192] * 32)
    yield decode_case(device, Geometry(), [32768])
    yield decode_case(device, Geometry(), [1024] * 128)
    yield prefill_case(device, Geometry(), [(0, 8192)], target=0.60)
    yield prefill_case(device, Geometry(), [(8192, 2048)])
    yield write_case(device, Geometry(), 4096)


class _Cache:
    """One layer of random keys and values, each sequence's in blocks of its own."""

    def __init__(
        self, device: torch.device, kind: Geometry, lengths: Sequence[int], seed: int
    ) -> None:
        counts = [-(-length // kind.block_size) for length in lengths]
        spec = KVCacheSpec(
            num_blocks=sum(counts) + 1,
            num_layers=1,
            num_kv_heads=kind.num_kv_heads,
            block_size=kind.block_size,
            head_dim=kind.head_dim,
            dtype=kind.kv,
        )
        generator = torch.Generator(device).manual_seed(seed)
        pool = torch.zeros(spec.num_blocks, spec.block_bytes, dtype=torch.uint8, device=device)
        view = kv_view(pool, spec)
        for part in (view.keys, view.values):
            if kind.kv == "int8":
                part.random_(-127, 128, generator=generator)
            else:
                part.normal_(generator=generator)
        for scales in (view.k_scales, view.v_scales):
            if scales is not None:
                scales.uniform_(0.004, 0.012, generator=generator)
        self.layer: Layer = (
            view.keys[:, 0],
            view.values[:, 0],
            None if view.k_scales is None else view.k_scales[:, 0],
            None if view.v_scales is None else view.v_scales[:, 0],
        )
        order = torch.randperm(spec.num_blocks, generator=generator, device=device)
        width = -(-max([*counts, 1]) // 16) * 16
        self.tables = torch.zeros(len(lengths), width, dtype=torch.int32, device=device)
        first = 0
        for row, count in enumerate(counts):
            self.tables[row, :count] = order[first : first + count]
            first += count
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.row_bytes = spec.row_bytes
        self._lengths = list(lengths)

    def sequence(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Its keys and values, [length, Hkv, D] float64."""
        keys, values, k_scales, v_scales = self.layer
        found = []
        for part, scales in ((keys, k_scales), (values, v_scales)):
            blocks = self.tables[row].long()
            wide = part[blocks].double()  # [blocks, Hkv, block_size, D]
            if scales is not None:
                wide *= scales[blocks].double()[..., None]
            rows = wide.permute(0, 2, 1, 3).flatten(0, 1)
            found.append(rows[: self._lengths[row]])
        return found[0], found[1]


def decode_case(
    device: torch.device, kind: Geometry, lengths: Sequence[int], *, num_splits: int = 0,
    target: float = 0.0,
) -> Case:  # fmt: skip
    """One token of each sequence; ``num_splits`` 0: as the backend would choose."""
    cache = _Cache(device, kind, lengths, seed=len(lengths))
    batch, heads, dim = len(lengths), kind.num_q_heads, kind.head_dim
    dtype = ACTIVATIONS[kind.activation]
    q = _random(device, batch, heads, dim, dtype=dtype)
    out = poisoned(batch, heads, dim, dtype=dtype, device=device)
    if not num_splits:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        num_splits = decode.choose_splits(batch, kind.num_kv_heads, max(lengths), processors)
    size = decode.workspace_size(batch, heads, dim, num_splits)
    workspace = torch.empty(size, dtype=torch.float32, device=device)
    options = {"scale": dim**-0.5, "window": kind.window, "softcap": kind.softcap}

    def run() -> torch.Tensor:
        decode.paged_decode(
            q, *cache.layer, cache.tables, cache.lengths, out=out, workspace=workspace,
            num_splits=num_splits, **options,
        )  # fmt: skip
        return out

    def expected() -> torch.Tensor:
        rows = [torch.zeros(heads, dim, dtype=torch.float64, device=device) for _ in lengths]
        for row, length in enumerate(lengths):
            if length:
                rows[row] = decode.reference(q[row].double(), *cache.sequence(row), **options)
        return torch.stack(rows)

    kv_bytes = 2 * sum(lengths) * kind.num_kv_heads * cache.row_bytes
    return Case(
        kernel="paged_decode",
        inputs=f"{_lengths(lengths)}, {kind.describe()}, {num_splits} splits",
        run=run, error=relative_error(run, expected), bound=_BOUNDS[kind.activation],
        num_bytes=kv_bytes + 2 * q.nbytes, target=target,
    )  # fmt: skip


def prefill_case(
    device: torch.device, kind: Geometry, chunks: Sequence[tuple[int, int]], *, target: float = 0.0
) -> Case:
    """Chunks of (tokens cached before, tokens computed)."""
    cache = _Cache(device, kind, [before + count for before, count in chunks], seed=len(chunks))
    counts = [count for _, count in chunks]
    heads, dim = kind.num_q_heads, kind.head_dim
    dtype = ACTIVATIONS[kind.activation]
    q = _random(device, sum(counts), heads, dim, dtype=dtype)
    out = poisoned(sum(counts), heads, dim, dtype=dtype, device=device)
    starts = torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)
    options = {"scale": dim**-0.5, "window": kind.window, "softcap": kind.softcap}

    def run() -> torch.Tensor:
        prefill.varlen_prefill(
            q, *cache.layer, starts, cache.lengths, cache.tables, max_query_len=max(counts),
            out=out, **options,
        )  # fmt: skip
        return out

    def expected() -> torch.Tensor:
        parts, first = [], 0
        for row, count in enumerate(counts):
            keys, values = cache.sequence(row)
            # A share of the heads at a time: scores in float64 are large.
            group = heads // kind.num_kv_heads
            by_head = [
                prefill.reference(
                    q[first : first + count, head * group : (head + 1) * group].double(),
                    keys[:, head : head + 1], values[:, head : head + 1], **options,
                )
                for head in range(kind.num_kv_heads)
            ]  # fmt: skip
            parts.append(torch.cat(by_head, dim=1))
            first += count
        return torch.cat(parts)

    seen = sum(count * before + count * (count + 1) // 2 for before, count in chunks)
    return Case(
        kernel="varlen_prefill",
        inputs=f"{', '.join(f'{before}+{count}' for before, count in chunks)}, {kind.describe()}",
        run=run, error=relative_error(run, expected), bound=_BOUNDS[kind.activation],
        num_flops=4 * seen * heads * dim, target=target,
    )  # fmt: skip


def write_case(device: torch.device, kind: Geometry, num_tokens: int) -> Case:
    """Rotation and norms of q and k; what is written to the cache is checked by attention."""
    cache = _Cache(device, kind, [num_tokens], seed=num_tokens)
    num_q, num_kv, dim = kind.num_q_heads, kind.num_kv_heads, kind.head_dim
    dtype = ACTIVATIONS[kind.activation]
    original = _random(device, num_tokens, (num_q + 2 * num_kv) * dim, dtype=dtype)
    qkv = original.clone()
    positions = torch.arange(num_tokens, dtype=torch.int32, device=device)
    angles = torch.outer(positions.float(), 0.3 ** torch.arange(dim // 2, device=device))
    cos, sin = angles.cos(), angles.sin()
    q_norm, k_norm = (_random(device, dim, dtype=torch.float32) for _ in range(2))
    size = kind.block_size
    table = cache.tables[0].long()
    token = positions.long()
    slots = table[token // size] * size + token % size

    def run() -> torch.Tensor:
        qkv.copy_(original)
        rope.rope_kv_write(
            qkv, positions, slots, cos, sin, q_norm, k_norm, 1e-6, *cache.layer, num_q
        )
        return qkv.view(num_tokens, -1, dim)

    def expected() -> torch.Tensor:
        return rope.reference(
            original.double(), positions, cos.double(), sin.double(), q_norm.double(),
            k_norm.double(), 1e-6, num_q, num_kv,
        )  # fmt: skip

    return Case(
        kernel="rope_kv_write", inputs=f"{num_tokens} tokens, {kind.describe()}, with a copy",
        run=run, error=relative_error(run, expected), bound=_BOUNDS[kind.activation],
        num_bytes=4 * qkv.nbytes + 2 * num_tokens * num_kv * cache.row_bytes,
    )  # fmt: skip


def _random(device: torch.device, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def _lengths(lengths: Sequence[int]) -> str:
    if len(set(lengths)) == 1:
        return f"{len(lengths)} x {lengths[0]}"
    return "+".join(map(str, lengths))
