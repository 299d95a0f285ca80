"""Prints digests of what each kind of kernel computes at this process's level of instructions.

Run as ``python -m tests.unit.engine.kernel_bits`` with PDMESH_CPU_LEVEL: two levels need two
processes. The first line is the level, then ``kernel digest`` lines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch

from engine.backend import KVCacheSpec, KVDtype, RopeTable
from engine.backends.cpu.backend import CpuBackend
from engine.backends.cpu.level import LEVEL
from engine.batch import build_batch
from engine.scheduling.step_plan import ScheduledChunk
from mesh.threads import configure_threads
from tests.unit.engine.quantized_format import random_matrix
from tests.unit.engine.tiny_llama import new_sequence

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 64, 16
ROW_COUNTS = (1, 2, 3, 5, 7, 13, 40)
KV_DTYPES: tuple[KVDtype, ...] = ("fp32", "fp16", "int8")


def digests() -> Iterator[tuple[str, str]]:
    """(kernel, digest) of every kind of kernel."""
    for scheme in ("fp32", "int8", "int4"):
        linear = CpuBackend(scheme, 1).linear(random_matrix(100, 576, seed=1))
        x = random_matrix(max(ROW_COUNTS), 576, seed=2)
        yield f"{scheme} product", _digest([linear(x[:rows]) for rows in ROW_COUNTS])
    backend = CpuBackend("fp32", 1)
    x, weight = random_matrix(3, 576, seed=3), random_matrix(1, 576, seed=4)[0]
    yield "norm", _digest([backend.rms_norm(x, weight, 1e-5)])
    residual = random_matrix(3, 576, seed=5)
    yield "added norm", _digest([backend.add_rms_norm(x, residual, weight, 1e-5), residual])
    for activation in ("silu", "gelu_tanh"):
        yield activation, _digest([backend.act_mul(x, activation)])
    for dtype in KV_DTYPES:
        yield f"attention over {dtype}", _digest(_attention(dtype))


def _attention(dtype: KVDtype) -> Iterator[torch.Tensor]:
    """A prompt in two chunks, then a decode; and what lies in the cache."""
    backend = CpuBackend("fp32", 1)
    num_tokens, first = 150, 130
    spec = KVCacheSpec(
        num_blocks=10, num_layers=1, num_kv_heads=NUM_KV_HEADS, block_size=BLOCK_SIZE,
        head_dim=HEAD_DIM, dtype=dtype,
    )  # fmt: skip
    raw = backend.allocate_kv_cache(spec).raw
    width = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    qkv = random_matrix(num_tokens, width, seed=6)
    angles = random_matrix(num_tokens, HEAD_DIM // 2, seed=7).numpy()
    rope = RopeTable(torch.from_numpy(np.cos(angles)), torch.from_numpy(np.sin(angles)))
    sequence = new_sequence([0] * num_tokens)
    sequence.block_table = [5, 2, 8, 0, 9, 7, 6, 1, 4, 3]
    for start, end in ((0, first), (first, num_tokens - 1), (num_tokens - 1, num_tokens)):
        sequence.num_computed_tokens = start
        step = backend.begin_step(build_batch([ScheduledChunk(sequence, end - start)], BLOCK_SIZE))
        part = qkv[start:end].clone()
        backend.rope_and_write_kv(part, rope, None, 0, step)
        yield backend.paged_attention(part, 0, 0.125, 0, step)
    yield raw


def _digest(tensors: list[torch.Tensor] | Iterator[torch.Tensor]) -> str:
    hashed = hashlib.sha256()
    for tensor in tensors:
        assert tensor.dtype == torch.uint8 or tensor.isfinite().all()
        hashed.update(tensor.numpy().tobytes())
    return hashed.hexdigest()[:16]


if __name__ == "__main__":
    configure_threads()
    print(LEVEL)
    for kernel, digest in digests():
        print(f"{kernel}: {digest}")
