"""A poisoned GPU KV pool with sequences of random keys and values in random blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.backend import KVCacheSpec, KVDtype
from engine.backends.gpu.kv_view import KVView, kv_view

POISON = 0xFF
"""NaN as a float of any size, -1 as an int8."""
NUM_LAYERS, LAYER = 2, 1
ACTIVATION = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class PagedCache:
    """``keys`` and ``values`` are float64 [len, Hkv, D] per sequence, as the cache stores them."""

    def __init__(
        self, lengths: Sequence[int], *, dtype: KVDtype, num_kv_heads: int, block_size: int,
        head_dim: int, generator: torch.Generator, spare_width: int = 1,
    ) -> None:  # fmt: skip
        counts = [-(-length // block_size) for length in lengths]
        width = max([*counts, 0]) + spare_width
        self.spec = KVCacheSpec(
            num_blocks=sum(counts) + 2,
            num_layers=NUM_LAYERS,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            head_dim=head_dim,
            dtype=dtype,
        )
        shape = (self.spec.num_blocks, self.spec.block_bytes)
        self.pool = torch.full(shape, POISON, dtype=torch.uint8)
        self.view: KVView = kv_view(self.pool, self.spec)
        blocks = torch.randperm(self.spec.num_blocks, generator=generator).tolist()
        # An entry past a sequence's own blocks must never be followed.
        self.block_tables = torch.full((len(lengths), width), 1 << 29, dtype=torch.int32)
        self.context_lens = torch.tensor(lengths, dtype=torch.int32)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            own = [blocks.pop() for _ in range(count)]
            self.block_tables[row, :count] = torch.tensor(own, dtype=torch.int32)
            size = (length, num_kv_heads, head_dim)
            for side in (True, False):
                rows = torch.randn(size, generator=generator, dtype=torch.float64)
                stored = self._store(rows, own, keys=side)
                (self.keys if side else self.values).append(stored)

    def layer(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Keys, values and scales as a kernel takes them."""
        k_scales, v_scales = self.view.k_scales, self.view.v_scales
        return (
            self.view.keys[:, LAYER],
            self.view.values[:, LAYER],
            None if k_scales is None else k_scales[:, LAYER],
            None if v_scales is None else v_scales[:, LAYER],
        )

    def _store(self, rows: torch.Tensor, own: list[int], *, keys: bool) -> torch.Tensor:
        elements = self.view.keys if keys else self.view.values
        scales = self.view.k_scales if keys else self.view.v_scales
        stored = rows.clone()
        for position, row in enumerate(rows):
            block, offset = own[position // self.spec.block_size], position % self.spec.block_size
            if scales is None:
                elements[block, LAYER, :, offset] = row.to(elements.dtype)
                stored[position] = elements[block, LAYER, :, offset].double()
            else:
                scale = (row.abs().amax(-1) / 127).float()
                codes = (row / scale[:, None]).round()
                elements[block, LAYER, :, offset] = codes.to(torch.int8)
                scales[block, LAYER, :, offset] = scale
                stored[position] = codes * scale.double()[:, None]
        return stored
