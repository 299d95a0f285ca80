"""Rotating q and k and storing k and v: in place, in the tokens' own slots, nowhere else."""

from __future__ import annotations

import pytest
import torch

from engine.backend import KVCacheSpec, KVDtype
from engine.backends.gpu.kernels.attention.rope_kv_write import reference, rope_kv_write
from engine.backends.gpu.kv_view import kv_view
from tests.unit.engine.gpu.paged_cache import ACTIVATION, LAYER, NUM_LAYERS, POISON

NUM_BLOCKS, MAX_POSITIONS, EPS = 6, 50, 1e-5
ROUNDING = {"fp32": 4e-6, "bf16": 2**-7, "fp16": 2**-10}


class Written:
    """One call over tokens in random slots, some of them padding."""

    def __init__(
        self, num_tokens: int, *, activation: str = "fp32", dtype: KVDtype = "fp32",
        heads: tuple[int, int] = (4, 2), head_dim: int = 16, block_size: int = 8,
        norm: bool = False,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(num_tokens + 31 * heads[0] + head_dim)
        num_q_heads, num_kv_heads = heads
        spec = KVCacheSpec(
            num_blocks=NUM_BLOCKS,
            num_layers=NUM_LAYERS,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            head_dim=head_dim,
            dtype=dtype,
        )
        pool = torch.full((NUM_BLOCKS, spec.block_bytes), POISON, dtype=torch.uint8)
        view = kv_view(pool, spec)
        width = (num_q_heads + 2 * num_kv_heads) * head_dim
        wide = torch.randn(num_tokens, width + 16, generator=generator)
        qkv = wide.to(ACTIVATION[activation])[:, :width]  # rows apart from each other
        slots = torch.randperm(NUM_BLOCKS * block_size, generator=generator)[:num_tokens]
        slots[1::4] = -1
        positions = torch.randint(0, MAX_POSITIONS, (num_tokens,), generator=generator)
        angles = torch.rand(MAX_POSITIONS, head_dim // 2, generator=generator) * 6.28
        weights = torch.randn(2, head_dim, generator=generator)
        norms = (weights[0], weights[1]) if norm else (None, None)
        self.expected = reference(
            qkv.double(), positions, angles.cos(), angles.sin(), *norms, EPS, *heads
        )
        scales = (view.k_scales, view.v_scales)
        rope_kv_write(
            qkv, positions.int(), slots, angles.cos(), angles.sin(), *norms, EPS,
            view.keys[:, LAYER], view.values[:, LAYER],
            *(None if part is None else part[:, LAYER] for part in scales), num_q_heads,
        )  # fmt: skip
        self.found = qkv.reshape(num_tokens, num_q_heads + 2 * num_kv_heads, head_dim).double()
        kept = slots >= 0
        self.expected_kv = self.expected[kept, num_q_heads:]
        """[stored tokens, 2 Hkv, D]."""
        blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
        parts = [part[blocks, LAYER, :, offsets] for part in (view.keys, view.values)]
        self.stored = torch.cat(parts, dim=1).double()
        self.scales = torch.ones(())
        if scales[0] is not None and scales[1] is not None:
            parts = [part[blocks, LAYER, :, offsets] for part in (scales[0], scales[1])]
            self.scales = torch.cat(parts, dim=1).double()[..., None]
        for part in (view.keys, view.values, *scales):
            if part is not None:
                poison = torch.full((4,), POISON, dtype=torch.uint8).view(part.dtype)[0]
                part[blocks, LAYER, :, offsets] = poison
        self.rest_is_untouched = bool((pool == POISON).all())


@pytest.mark.parametrize("activation", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (10, 9)])
def test_q_and_k_are_rotated_in_place(activation: str, norm: bool, heads: tuple[int, int]) -> None:
    written = Written(5, activation=activation, norm=norm, heads=heads)
    tolerance = ROUNDING[activation]
    torch.testing.assert_close(written.found, written.expected, atol=tolerance, rtol=tolerance)
    values = slice(sum(heads), None)
    assert torch.equal(written.found[:, values], written.expected[:, values])


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8"])
def test_only_the_tokens_own_slots_of_the_layer_are_written(
    num_tokens: int, dtype: KVDtype
) -> None:
    written = Written(num_tokens, dtype=dtype)
    assert len(written.stored) == num_tokens - len(range(1, num_tokens, 4))
    assert written.rest_is_untouched


@pytest.mark.parametrize("block_size", [8, 16, 12])
@pytest.mark.parametrize("head_dim", [16, 24, 64])
def test_slots_hold_the_rows(block_size: int, head_dim: int) -> None:
    written = Written(9, block_size=block_size, head_dim=head_dim, norm=True)
    torch.testing.assert_close(written.stored, written.expected_kv, atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_slots_hold_the_rotated_rows_rounded_once(dtype: KVDtype) -> None:
    written = Written(13, dtype=dtype)
    tolerance = ROUNDING[dtype] / 2
    error = (written.stored - written.expected_kv).abs()
    assert (error <= written.expected_kv.abs() * tolerance + 1e-6).all()


@pytest.mark.parametrize("activation", ["fp32", "bf16"])
def test_int8_slots_hold_codes_and_the_rows_own_scale(activation: str) -> None:
    written = Written(13, activation=activation, dtype="int8", heads=(4, 3), head_dim=32)
    largest = written.expected_kv.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(written.scales, largest / 127, rtol=1e-5, atol=0)
    assert (written.stored.abs().amax(-1) == 127).all()
    error = (written.stored * written.scales - written.expected_kv).abs()
    assert (error <= written.scales * 0.501).all()
