"""Rotating q and k, storing k and v: every row lands in its slot, and nothing lands elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.backend import KVCacheSpec, KVDtype, QKNorm, RopeTable
from engine.backends.cpu.backend import CpuBackend
from engine.backends.cpu.elementwise import SERIAL_ELEMENTS
from engine.batch import build_batch
from engine.scheduling.step_plan import ScheduledChunk
from tests.unit.engine.tiny_llama import new_sequence

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 32, 16
NUM_BLOCKS, NUM_LAYERS, LAYER = 14, 2, 1
EPS = 1e-6
POISON = 0xA5
POISONED = np.full(4, POISON, np.uint8)
ELEMENTS: dict[KVDtype, Any] = {
    "fp32": np.float32, "fp16": np.float16, "bf16": np.uint16, "int8": np.int8,
}  # fmt: skip
ROW_COUNTS = [1, 7, 33, 160]
assert ROW_COUNTS[-1] * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM > SERIAL_ELEMENTS
Wide = npt.NDArray[np.float64]


class Written:
    """One call over a chunk that starts inside a block, with what should come of it."""

    def __init__(self, rows: int, dtype: KVDtype, *, qk_norm: bool = False) -> None:
        rng = np.random.default_rng(rows)
        backend = CpuBackend("fp32", 2)
        spec = KVCacheSpec(
            num_blocks=NUM_BLOCKS,
            num_layers=NUM_LAYERS,
            num_kv_heads=NUM_KV_HEADS,
            block_size=BLOCK_SIZE,
            head_dim=HEAD_DIM,
            dtype=dtype,
        )
        raw = backend.allocate_kv_cache(spec).raw
        raw.fill_(POISON)
        sequence = new_sequence([0] * (13 + rows))
        sequence.num_computed_tokens = 13
        sequence.block_table = [5, 2, 8, 0, 9, 7, 6, 1, 11, 10, 12]
        batch = build_batch([ScheduledChunk(sequence, rows)], BLOCK_SIZE)
        angles = rng.uniform(-np.pi, np.pi, (256, HEAD_DIM // 2)).astype(np.float32)
        rope = RopeTable(torch.from_numpy(np.cos(angles)), torch.from_numpy(np.sin(angles)))
        norms = rng.standard_normal((2, HEAD_DIM)).astype(np.float32)
        norm = QKNorm(torch.from_numpy(norms[0]), torch.from_numpy(norms[1]), EPS)
        heads = NUM_HEADS + 2 * NUM_KV_HEADS
        qkv = rng.standard_normal((rows, heads, HEAD_DIM)).astype(np.float32)
        self.expected = qkv.astype(np.float64)
        if qk_norm:
            self._normalise(slice(NUM_HEADS), norms[0])
            self._normalise(slice(NUM_HEADS, NUM_HEADS + NUM_KV_HEADS), norms[1])
        self._rotate(angles[batch.positions])
        tensor = torch.from_numpy(qkv.reshape(rows, -1).copy())
        step = backend.begin_step(batch)
        backend.rope_and_write_kv(tensor, rope, norm if qk_norm else None, LAYER, step)
        self.found = tensor.numpy().reshape(rows, heads, HEAD_DIM)
        blocks, offsets = np.divmod(batch.slot_mapping, BLOCK_SIZE)
        elements = raw.numpy().view(ELEMENTS[dtype])
        parts = elements.reshape(NUM_BLOCKS, NUM_LAYERS, 2, NUM_KV_HEADS, -1)
        size = BLOCK_SIZE * HEAD_DIM
        shape = (NUM_BLOCKS, NUM_LAYERS, NUM_KV_HEADS)
        keys = parts[:, :, 0, :, :size].reshape(*shape, HEAD_DIM, BLOCK_SIZE, copy=False)
        values = parts[:, :, 1, :, :size].reshape(*shape, BLOCK_SIZE, HEAD_DIM, copy=False)
        slots = keys.swapaxes(3, 4), values
        self.stored = np.stack([part[blocks, LAYER, :, offsets] for part in slots], axis=1)
        """[rows, 2, Hkv, D] in the storage dtype."""
        for part in slots:
            part[blocks, LAYER, :, offsets] = POISONED.view(ELEMENTS[dtype])[0]
        if dtype == "int8":
            scales = (
                raw.numpy().view(np.float32).reshape(NUM_BLOCKS, NUM_LAYERS, 2, NUM_KV_HEADS, -1)
            )
            scales = scales[..., -BLOCK_SIZE:]
            self.scales = scales[blocks, LAYER, :, :, offsets].copy()
            """[rows, 2, Hkv]."""
            scales[blocks, LAYER, :, :, offsets] = POISONED.view(np.float32)[0]
        self.rest_is_untouched = bool((raw.numpy() == POISON).all())

    @property
    def expected_kv(self) -> Wide:
        """[rows, 2, Hkv, D]."""
        kv = self.expected[:, NUM_HEADS:]
        return kv.reshape(len(kv), 2, NUM_KV_HEADS, HEAD_DIM)

    def _normalise(self, heads: slice, weight: npt.NDArray[np.float32]) -> None:
        part = self.expected[:, heads]
        self.expected[:, heads] = (
            part / np.sqrt((part**2).mean(axis=2, keepdims=True) + EPS) * weight
        )

    def _rotate(self, angles: npt.NDArray[np.float32]) -> None:
        rotated = self.expected[:, : NUM_HEADS + NUM_KV_HEADS]
        low, high = np.split(rotated.copy(), 2, axis=2)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        rotated[:] = np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=2)


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_q_and_k_are_rotated_in_place_and_v_is_kept(rows: int, qk_norm: bool) -> None:
    written = Written(rows, "fp32", qk_norm=qk_norm)
    np.testing.assert_allclose(written.found, written.expected, atol=5e-6, rtol=0)
    values = slice(NUM_HEADS + NUM_KV_HEADS, None)
    assert np.array_equal(written.found[:, values], written.expected[:, values])


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8"])
def test_only_the_tokens_own_slots_of_the_layer_are_written(rows: int, dtype: KVDtype) -> None:
    assert Written(rows, dtype).rest_is_untouched


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize(("dtype", "relative"), [("fp32", 0.0), ("fp16", 2**-11), ("bf16", 2**-8)])
def test_slots_hold_the_rounded_rows(rows: int, dtype: KVDtype, relative: float) -> None:
    written = Written(rows, dtype)
    stored = written.stored
    if dtype == "bf16":
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    exact = written.found[:, NUM_HEADS:].reshape(stored.shape)
    assert (abs(stored - exact) <= relative * abs(exact) + 1e-7 * (relative > 0)).all()
    np.testing.assert_allclose(exact, written.expected_kv, atol=5e-6, rtol=0)


@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_int8_slots_hold_codes_and_the_rows_own_scale(rows: int) -> None:
    written = Written(rows, "int8")
    codes = written.stored.astype(np.float64)
    scales = written.scales.astype(np.float64)[..., None]
    exact = written.found[:, NUM_HEADS:].reshape(codes.shape)
    largest = abs(exact).max(axis=-1, keepdims=True)
    np.testing.assert_allclose(scales, largest / 127, rtol=1e-6)
    assert (abs(codes * scales - exact) <= scales * 0.5001).all()
    assert (abs(codes).max(axis=-1) == 127).all()
