"""All layers in one compiled loop give the bits that they give op by op."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.backends.cpu.backend import CpuBackend, WeightScheme
from engine.batch import BatchInputs, build_batch
from engine.engine import Engine
from engine.models.decoder import Decoder
from engine.scheduling.step_plan import ScheduledChunk
from mesh.config import WorkerConfig
from tests.unit.engine.families import FAMILIES, random_model
from tests.unit.engine.tiny_llama import new_sequence

PLAIN = ["llama", "llama-bias-untied", "qwen2", "qwen3"]
"""With biases, with norms of q and k, and with neither."""
NUM_LAYERS = 3
Watch = Callable[[int], None]


def _engine(family: str, folder: Path, weights: WeightScheme) -> Engine:
    random_model(family, folder)
    config = WorkerConfig(
        role="decode", worker_id="test", redis_url="redis://127.0.0.1:1/0",
        model=str(folder), kv_blocks=64, max_batched_tokens=256, weights=weights,
    )  # fmt: skip
    return Engine(config, CpuBackend(weights, 2))


def _batch(engine: Engine, num_prompts: int, start: int, stop: int) -> BatchInputs:
    chunks = []
    for index in range(num_prompts):
        sequence = new_sequence([(7 * i + index) % 300 + 3 for i in range(stop)])
        sequence.block_table = list(range(6 * index, 6 * index + 6))
        sequence.num_computed_tokens = start
        chunks.append(ScheduledChunk(sequence, stop - start))
    return build_batch(chunks, engine.kv_spec.block_size)


def _op_by_op(model: Decoder) -> Decoder:
    return model.instrumented(model.backend, lambda x, *_: x, lambda x: x, lambda x: x)


@pytest.mark.parametrize("weights", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("family", PLAIN)
def test_bits_are_those_of_op_by_op(family: str, weights: WeightScheme, tmp_path: Path) -> None:
    engine = _engine(family, tmp_path, weights)
    assert engine.model.has_layer_stack
    single = _op_by_op(engine.model)
    assert not single.has_layer_stack
    memory = engine.kv_memory.raw
    for num_prompts, start, stop in [(1, 0, 70), (1, 70, 71), (5, 0, 40), (5, 40, 41), (9, 3, 5)]:
        batch = _batch(engine, num_prompts, start, stop)
        before = memory.clone()
        together = engine.model.forward(batch).clone()
        cached = memory.clone()
        memory.copy_(before)
        assert torch.equal(single.forward(batch), together)
        assert torch.equal(memory, cached)


def test_every_layer_is_told_of_in_order_once_its_kv_is_written(tmp_path: Path) -> None:
    engine = _engine("llama", tmp_path, "int8")
    cache = engine.kv_memory.raw.view(engine.kv_spec.num_blocks, NUM_LAYERS, -1)
    told: list[tuple[int, list[bool]]] = []

    def watch(layer: int) -> None:
        told.append((layer, [bool(cache[0, x].any()) for x in range(NUM_LAYERS)]))

    batch = _batch(engine, 1, 0, 20)
    logits = engine.model.forward(batch, watch).clone()
    assert told == [
        (0, [True, False, False]),
        (1, [True, True, False]),
        (2, [True, True, True]),
    ]
    assert torch.equal(engine.model.forward(batch), logits)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama-linear", *PLAIN}))
def test_only_plain_models_have_one(family: str, tmp_path: Path) -> None:
    expected = family not in {"gemma3", "qwen3-moe"}
    assert _engine(family, tmp_path, "fp32").model.has_layer_stack is expected
