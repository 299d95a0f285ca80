"""What ``engine.backends.gpu.tune`` measures for attention over the paged cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.backend import KVCacheSpec, KVDtype
from engine.backends.gpu.kernels.attention.paged_decode import (
    choose_splits,
    paged_decode,
    workspace_size,
)
from engine.backends.gpu.kernels.attention.varlen_prefill import varlen_prefill
from engine.backends.gpu.kv_view import KVView, kv_view
from engine.backends.gpu.tuning import Condition, LaunchConfig
from engine.backends.gpu.tuning_case import TuningCase

_GROUP = 4
_BLOCK_SIZE = 16
_KEYS: dict[KVDtype, tuple[dict[str, Condition], ...]] = {
    "bf16": ({"kv": "bf16", "dot": "bf16"}, {"kv": "fp16", "dot": "fp16"}),
    "int8": ({"kv": "int8", "dot": "fp16"},),
}
"""What the tables call a cache dtype; float16 does as well with what bfloat16 does well with."""
_PREFILL_CASES = [(1, 16, 4, 0), (17, 64, 16, 0), (65, 128, 0, 0), (65, 128, 0, 1024)]
"""(fewest rows, most, tokens of a chunk or 0 for half a context of one sequence, window)"""


def tuning_cases(
    device: torch.device,
    *,
    batch: int = 32,
    context: int = 8192,
    num_kv_heads: int = 8,
    head_dims: tuple[int, ...] = (64, 128, 256),
) -> Iterator[TuningCase]:
    """By head size and cache dtype: decoding, then chunks of a few tokens, then long ones."""
    for head_dim in head_dims:
        for dtype in _KEYS:
            cache = _Cache(device, dtype, batch, context, num_kv_heads, head_dim)
            yield cache.decode_case()
            for case in _PREFILL_CASES:
                yield cache.prefill_case(*case)


class _Cache:
    """One layer of random keys and values of ``batch`` sequences, in random blocks."""

    def __init__(
        self, device: torch.device, dtype: KVDtype, batch: int, context: int, num_kv_heads: int,
        head_dim: int,
    ) -> None:  # fmt: skip
        self._device = device
        width = -(-context // _BLOCK_SIZE)
        spec = KVCacheSpec(
            num_blocks=batch * width,
            num_layers=1,
            num_kv_heads=num_kv_heads,
            block_size=_BLOCK_SIZE,
            head_dim=head_dim,
            dtype=dtype,
        )
        shape = (spec.num_blocks, spec.block_bytes)
        self._view: KVView = kv_view(torch.empty(shape, dtype=torch.uint8, device=device), spec)
        for elements in (self._view.keys, self._view.values):
            if dtype == "int8":
                elements.random_(-127, 128)
            else:
                elements.normal_()
        for scales in (self._view.k_scales, self._view.v_scales):
            if scales is not None:
                scales.fill_(1 / 64)
        blocks = torch.randperm(spec.num_blocks, device=device).int()
        self._tables = blocks.view(batch, width)
        self._lens = torch.full((batch,), context, dtype=torch.int32, device=device)
        self._when: tuple[dict[str, Condition], ...] = tuple(
            {"head_dim": head_dim, **key} for key in _KEYS[dtype]
        )
        self._heads = num_kv_heads * _GROUP

    def decode_case(self) -> TuningCase:
        """Every sequence's next token."""
        batch, head_dim = len(self._lens), self._view.keys.shape[-1]
        q = self._queries(batch)
        out = torch.empty_like(q)
        num_sms = 1
        if self._device.type == "cuda":
            num_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        context = self._tables.shape[1] * _BLOCK_SIZE
        num_splits = choose_splits(batch, self._heads // _GROUP, context, num_sms)
        size = workspace_size(batch, self._heads, head_dim, num_splits)
        workspace = torch.empty(size, dtype=torch.float32, device=self._device)

        def launch(config: LaunchConfig) -> None:
            paged_decode(
                q, *self._layer(), self._tables, self._lens, scale=head_dim**-0.5, out=out,
                workspace=workspace, num_splits=num_splits, config=config,
            )  # fmt: skip

        candidates = [
            LaunchConfig(meta={"BLOCK_N": block_n}, num_warps=warps, num_stages=stages)
            for block_n in (32, 64, 128)
            for warps in (4, 8)
            for stages in (3, 5, 7)
        ]
        return TuningCase(
            kernel="paged_decode", whens=self._when, candidates=candidates, launch=launch
        )

    def prefill_case(self, first: int, last: int, num_tokens: int, window: int) -> TuningCase:
        """Chunks at the end of every sequence's context, or a long one of the first sequence."""
        count = len(self._lens) if num_tokens else 1
        num_tokens = num_tokens or self._tables.shape[1] * _BLOCK_SIZE // 2
        q = self._queries(count * num_tokens)
        out = torch.empty_like(q)
        starts = torch.arange(count + 1, dtype=torch.int32, device=self._device) * num_tokens

        def launch(config: LaunchConfig) -> None:
            varlen_prefill(
                q, *self._layer(), starts, self._lens[:count], self._tables[:count],
                scale=q.shape[2] ** -0.5, window=window, max_query_len=num_tokens, out=out,
                config=config,
            )  # fmt: skip

        candidates = [
            LaunchConfig(
                meta={"BLOCK_M": block_m, "BLOCK_N": block_n}, num_warps=warps, num_stages=stages
            )
            for block_m in ((last,) if last <= 64 else (64, 128))
            for block_n in (32, 64, 128)
            for warps in (4, 8)
            for stages in (3, 5)
        ]
        own: dict[str, Condition] = {"rows": (first, last)}
        if last > 64:
            own["plain"] = int(window == 0)
        whens = tuple({**when, **own} for when in self._when)
        return TuningCase(
            kernel="varlen_prefill", whens=whens, candidates=candidates, launch=launch
        )

    def _queries(self, num_tokens: int) -> torch.Tensor:
        head_dim = self._view.keys.shape[-1]
        q = torch.randn(num_tokens, self._heads, head_dim, device=self._device)
        return q.to(torch.bfloat16)

    def _layer(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        view = self._view
        return (
            view.keys[:, 0],
            view.values[:, 0],
            None if view.k_scales is None else view.k_scales[:, 0],
            None if view.v_scales is None else view.v_scales[:, 0],
        )
