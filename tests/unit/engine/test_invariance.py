"""No bit of a token's logits depends on how it was scheduled."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import pytest
import torch

from engine.backends.cpu.backend import CpuBackend
from engine.batch import BatchInputs
from engine.engine import Engine
from engine.sequence import Sequence
from mesh.config import WorkerConfig
from mesh.messages import SamplingParams
from tests.unit.engine.families import random_model
from tests.unit.engine.tiny_llama import TinyLlama

PROMPT = [(7 * i * i + 3 * i) % 90 + 3 for i in range(75)]
FILLER = [(5 * i) % 90 + 3 for i in range(33)]


def _sequence(name: str, tokens: list[int], max_tokens: int) -> Sequence:
    now_s = time.monotonic()
    return Sequence(
        request_id=name,
        transfer_id=name,
        token_ids=list(tokens),
        num_prompt_tokens=len(tokens),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        deadline_s=now_s + 1e6,
        arrival_s=now_s,
        cache_salt=name,
    )


def _logits(
    folder: str, budget: int, weights: str, prompt: list[int], others: SequenceOf[list[int]] = ()
) -> list[torch.Tensor]:
    """The subject's logits at each of 6 sampled positions."""
    config = WorkerConfig(
        role="decode", worker_id="t", redis_url="redis://127.0.0.1:1/0", model=folder,
        weights=weights, kv_blocks=64, max_batched_tokens=budget, max_step_ms=0.0,
    )  # fmt: skip
    engine = Engine(config, CpuBackend(config.weights, 2))
    subject = _sequence("subject", prompt, 6)
    sequences = [_sequence(f"other {i}", tokens, 9) for i, tokens in enumerate(others)]
    rows: list[torch.Tensor] = []
    forward = engine.model.forward

    def capture(batch: BatchInputs, on_kv_written: object) -> torch.Tensor:
        logits = forward(batch)
        for index, row in enumerate(batch.sample_rows):
            sequence = int((batch.query_starts <= row).nonzero()[0][-1])
            if subject.block_table and batch.block_tables[sequence][0] == subject.block_table[0]:
                rows.append(logits[index].clone())
        return logits

    engine.model.forward = capture  # type: ignore[method-assign]
    for sequence in (*sequences, subject):
        engine.scheduler.add(sequence)
    live = {*sequences, subject}
    while live:
        engine.step()
        for sequence in [s for s in live if s.finish_reason is not None]:
            engine.scheduler.finish(sequence)
            live.remove(sequence)
    return rows


def check(folder: str, weights: str) -> None:
    alone = _logits(folder, 512, weights, PROMPT)
    assert len(alone) == 6
    for budget in (1, 7, 16, 33):
        chunked = _logits(folder, budget, weights, PROMPT)
        assert all(torch.equal(a, b) for a, b in zip(alone, chunked, strict=True)), budget
    crowded = _logits(folder, 40, weights, PROMPT, [FILLER, PROMPT[:20], FILLER[:5]] * 3)
    assert all(torch.equal(a, b) for a, b in zip(alone, crowded, strict=True))
    # What was decoded token by token, prefilled in one piece: a recomputation.
    answer = [int(row.argmax()) for row in alone]
    again = _logits(folder, 512, weights, PROMPT + answer[:5])
    assert torch.equal(again[0], alone[5])


@pytest.mark.parametrize("weights", ["int8", "int4", "fp32"])
def test_chunks_batches_and_recomputation_give_equal_bits(
    weights: str, tiny_llama: TinyLlama
) -> None:
    check(str(tiny_llama.folder), weights)


def test_nor_do_those_of_experts(tmp_path: Path) -> None:
    random_model("qwen3-moe", tmp_path)
    check(str(tmp_path), "fp32")
