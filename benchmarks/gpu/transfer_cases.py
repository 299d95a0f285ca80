"""Blocks of KV on their way: gathered, scattered, compressed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.case import Case, poisoned, relative_error
from engine.backend import KVCacheSpec, KVDtype
from engine.backends.gpu.kernels.transfer import block_move, kv_compress

_NUM_BLOCKS = 7
_GROUP = 32


def checks(device: torch.device) -> Iterator[Case]:
    """Both directions, a range of heads, both layouts of keys."""
    for kv in ("bf16", "int8"):
        for keys_by_dim in (False, True):
            yield move_case(device, kv, 3, 2, (1, 3), keys_by_dim=keys_by_dim)
    for dtype in (torch.bfloat16, torch.float32):
        yield compress_case(device, dtype, 5, 2 * _GROUP)


def timed(device: torch.device) -> Iterator[Case]:
    """Of an 8B model: 8192 tokens, whole, and half of the heads."""
    yield move_case(device, "bf16", 512, 32, (0, 8))
    yield move_case(device, "bf16", 512, 32, (0, 4))
    yield move_case(device, "bf16", 512, 32, (0, 8), keys_by_dim=True)
    yield compress_case(device, torch.bfloat16, 4096, 16384)


def move_case(
    device: torch.device, kv: KVDtype, num_blocks: int, num_layers: int, heads: tuple[int, int],
    *, keys_by_dim: bool = False,
) -> Case:  # fmt: skip
    """Gather, scatter to another pool, and gather from there again."""
    spec = KVCacheSpec(
        num_blocks=num_blocks + 1, num_layers=num_layers, num_kv_heads=max(4, heads[1]),
        block_size=16, head_dim=128 if num_blocks > _NUM_BLOCKS else 32, dtype=kv,
    )  # fmt: skip
    generator = torch.Generator(device).manual_seed(num_blocks)
    shape = (spec.num_blocks, spec.block_bytes)
    pool = torch.randint(0, 256, shape, generator=generator, device=device, dtype=torch.uint8)
    other = torch.zeros_like(pool)
    ids = torch.randperm(spec.num_blocks, generator=generator, device=device)[:num_blocks]
    there = ids.flip(0)
    staging_shape = block_move.staging_shape(spec, num_blocks, heads)
    first, second = (torch.zeros(staging_shape, dtype=torch.uint8, device=device) for _ in range(2))

    def run() -> torch.Tensor:
        block_move.gather_blocks(pool, spec, ids, heads, first, keys_by_dim=keys_by_dim)
        return first

    def there_and_back() -> torch.Tensor:
        run()
        block_move.scatter_blocks(first, other, spec, there, heads, keys_by_dim=keys_by_dim)
        block_move.gather_blocks(other, spec, there, heads, second, keys_by_dim=keys_by_dim)
        return torch.stack([first, second])

    def expected() -> torch.Tensor:
        wanted = block_move.reference(pool, spec, ids, heads, keys_by_dim=keys_by_dim).double()
        return torch.stack([wanted, wanted])

    return Case(
        kernel="block_move",
        inputs=f"{num_blocks} blocks, {num_layers} layers, heads {heads[0]}-{heads[1]} of "
        f"{spec.num_kv_heads}, {kv}{', keys turned' * keys_by_dim}",
        run=run, error=relative_error(there_and_back, expected), bound=0.0,
        num_bytes=2 * first.nbytes,
    )  # fmt: skip


def compress_case(
    device: torch.device, dtype: torch.dtype, num_segments: int, num_elements: int
) -> Case:
    """Compress and expand; a tie may go to either of two steps, of which 127 are the largest."""
    generator = torch.Generator(device).manual_seed(num_segments)
    segments = torch.randn(num_segments, num_elements, generator=generator, device=device).to(dtype)
    encoded = poisoned(
        num_segments, kv_compress.encoded_bytes(num_elements), dtype=torch.uint8, device=device
    )
    back = torch.empty_like(segments)
    ids = torch.arange(num_segments, device=device)
    there = ids.flip(0)
    not_finite = torch.zeros(1, dtype=torch.int32, device=device)

    def run() -> torch.Tensor:
        kv_compress.kv_compress(segments, ids, encoded, there, not_finite)
        return encoded

    def there_and_back() -> torch.Tensor:
        run()
        kv_compress.kv_expand(encoded, there, back, ids)
        return back

    def expected() -> torch.Tensor:
        steps, scales = kv_compress.reference(segments)
        return steps * scales.repeat_interleave(_GROUP, dim=1)

    return Case(
        kernel="kv_compress",
        inputs=f"{num_segments} x {num_elements} {dtype}".replace("torch.", ""),
        run=run, error=relative_error(there_and_back, expected),
        bound=1.2 / 127,
        num_bytes=segments.nbytes + encoded.nbytes,
    )  # fmt: skip
