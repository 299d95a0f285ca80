"""What it costs to send KV compressed: perplexity of a text's second half on the first one's KV."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.backends.cpu.backend import CpuBackend
from engine.batch import BatchInputs
from engine.engine import Engine
from kvtransfer.memory.compression import decode_segments, encode_segments
from mesh.config import KVDtype, Weights, WorkerConfig
from tests.integration.prompts import BLOCK_SIZE

_ELEMENTS = {"fp32": "float32", "fp16": "float16"}


def forward(engine: Engine, ids: list[int], start: int) -> torch.Tensor:
    """Logits of ``ids[start:]``; the KV of what comes before is in the cache."""
    rows = np.arange(start, len(ids))
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    batch = BatchInputs(
        token_ids=np.asarray(ids[start:], np.int64),
        token_sources=np.full(len(rows), -1, np.int32),
        positions=rows.astype(np.int32),
        slot_mapping=rows,
        query_starts=np.asarray([0, len(rows)], np.int32),
        context_lens=np.asarray([len(ids)], np.int32),
        block_tables=np.arange(num_blocks, dtype=np.int32)[None],
        sample_rows=np.arange(len(rows)),
    )
    with torch.inference_mode():
        return engine.model.forward(batch)


@pytest.mark.parametrize(("weights", "kv_dtype"), [("fp32", "fp32"), ("int8", "fp16")])
def test_perplexity_on_kv_that_was_sent_compressed(
    weights: Weights, kv_dtype: KVDtype, text_ids: list[int]
) -> None:
    half = len(text_ids) // 2 // BLOCK_SIZE * BLOCK_SIZE
    num_sent = half // BLOCK_SIZE
    num_blocks = -(-len(text_ids) // BLOCK_SIZE)
    engine = Engine(
        WorkerConfig(
            role="prefill", worker_id="wire", redis_url="redis://unused", weights=weights,
            kv_dtype=kv_dtype, kv_blocks=num_blocks + num_sent, block_size=BLOCK_SIZE,
        ),
        CpuBackend(weights, 2),
    )  # fmt: skip
    pool = engine.kv_memory.raw.numpy().reshape(-1)
    block_bytes = engine.kv_spec.block_bytes
    found = []
    for compressed in (False, True):
        forward(engine, text_ids[:half], 0)
        if compressed:
            staging = range(num_blocks, num_blocks + num_sent)
            element = _ELEMENTS[kv_dtype]
            assert encode_segments(pool, range(num_sent), block_bytes, element, staging)
            decode_segments(pool, staging, block_bytes, element)
            whole = pool.reshape(-1, block_bytes)
            whole[:num_sent] = whole[list(staging)]
        logits = forward(engine, text_ids, half)
        expected = torch.tensor(text_ids[half + 1 :])
        loss = float(torch.nn.functional.cross_entropy(logits[:-1], expected))
        found.append((math.exp(loss), torch.log_softmax(logits, 1)))
    (plain, before), (sent, after) = found
    divergence = float((before.exp() * (before - after)).sum(1).mean())
    print(
        f"weights {weights}, KV {kv_dtype}: perplexity {plain:.3f}, compressed {sent:.3f} "
        f"({100 * (sent / plain - 1):+.2f} %), KL divergence {divergence:.5f}"
    )
    assert sent == pytest.approx(plain, rel=0.01)
    assert 0 < divergence < (0.0005 if weights == "fp32" else 0.006)
