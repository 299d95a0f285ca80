"""Sizing a GPU's cache: the largest step on the CPU backend, and the measuring around it."""

from __future__ import annotations

import pytest
import torch

from engine.backends.cpu.backend import CpuBackend
from engine.batch import BatchInputs
from engine.engine import Engine
from engine.gpu_memory.largest_step import run_largest_step
from engine.gpu_memory.profile import GpuCacheSizer
from engine.model_config import ModelConfig
from engine.weights.hf_config import config_from_hf
from engine.weights.stored_size import least_weight_bytes
from mesh.config import WorkerConfig
from mesh.errors import ConfigError
from tests.unit.engine.memory_meter import Meter
from tests.unit.engine.tiny_llama import MAX_LEN, VOCAB_SIZE, TinyLlama

_MIB = 1 << 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return TinyLlama(tmp_path_factory.mktemp("tiny"))


def config(tiny: TinyLlama, **fields: object) -> WorkerConfig:
    return WorkerConfig(
        role="decode", worker_id="w", redis_url="redis://localhost", model=str(tiny.folder),
        weights="fp32", **fields,
    )  # fmt: skip


@pytest.mark.parametrize(("num_seqs", "num_tokens"), [(3, 64), (128, 100), (1, 200), (2, 900)])
def test_the_largest_step_is_as_large_as_a_step_can_be(
    tiny: TinyLlama, num_seqs: int, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny.engine()
    seen = []
    forward = engine.model.forward

    def watched(batch: BatchInputs) -> torch.Tensor:
        seen.append(batch)
        return forward(batch)

    monkeypatch.setattr(engine.model, "forward", watched)
    logits = run_largest_step(
        engine.model,
        engine.kv_spec,
        max_num_seqs=num_seqs,
        max_batched_tokens=num_tokens,
        max_model_len=MAX_LEN,
    )
    (batch,) = seen
    assert batch.num_tokens == min(num_tokens, num_seqs * MAX_LEN), "no sequence is longer"
    assert batch.context_lens.max() <= MAX_LEN
    assert logits.shape == (min(num_seqs, num_tokens), VOCAB_SIZE)
    assert logits.isfinite().all()
    assert set(batch.slot_mapping // engine.kv_spec.block_size) == {0}


def test_an_engine_gets_the_blocks_that_its_device_has_room_for(tiny: TinyLlama) -> None:
    asked = config(tiny, max_model_len=128)
    block_bytes = tiny.engine().kv_spec.block_bytes
    meter = Meter(100 * _MIB, elsewhere=5 * _MIB, before=20 * _MIB, at_most=27 * _MIB)
    engine = Engine(asked, CpuBackend("fp32", 1), sizer=GpuCacheSizer(asked, meter))
    assert meter.runs == 1
    assert engine.kv_spec.num_blocks == (90 - 5 - 27) * _MIB // block_bytes
    assert len(engine.kv_memory.raw) == engine.kv_spec.num_blocks
    assert engine.max_sequence_tokens == 128


def test_what_cannot_fit_is_refused_before_it_is_loaded(
    tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(tiny)
    meter = Meter(450 << 10)
    monkeypatch.setattr("engine.engine.Decoder", pytest.fail)
    with pytest.raises(ConfigError, match=r"^gpu_memory_utilization: .* not measured yet.*int4"):
        Engine(asked, CpuBackend("fp32", 1), sizer=GpuCacheSizer(asked, meter))
    assert meter.runs == 0


def test_what_turns_out_not_to_fit_is_refused_with_what_was_measured(tiny: TinyLlama) -> None:
    asked = config(tiny, kv_blocks=1000)
    meter = Meter(32 * _MIB, before=1 * _MIB, at_most=20 * _MIB)
    with pytest.raises(ConfigError, match=r"^kv_blocks: .*activations 0\.02 GiB.*--kv-blocks \d+"):
        Engine(asked, CpuBackend("fp32", 1), sizer=GpuCacheSizer(asked, meter))


def _llama_70b() -> ModelConfig:
    return config_from_hf(
        {
            "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192,
            "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
            "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False,
        }
    )  # fmt: skip


def test_the_weights_of_a_published_model_are_told_without_its_files() -> None:
    model = _llama_70b()
    tables = 2 * 128256 * 8192
    parameters = 70_553_706_496
    assert least_weight_bytes(model, "bf16") == 2 * parameters
    norms = (2 * 80 + 1) * 8192
    assert least_weight_bytes(model, "int8") == parameters + norms
    matrices = parameters - tables - norms
    assert least_weight_bytes(model, "int4") == int(matrices * 4.125 / 8) + tables + 2 * norms
    # Of eight ranks each has an eighth; of sixteen, two have the same KV heads.
    whole = parameters - norms
    assert least_weight_bytes(model, "int8", 8) == whole // 8 + 2 * norms
    kv = 2 * 80 * 8192 * 1024
    assert least_weight_bytes(model, "int8", 16) == (whole - kv) // 16 + kv // 8 + 2 * norms


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_the_estimate_is_no_more_than_a_device_stores(tiny: TinyLlama, weights: str) -> None:
    engine = tiny.engine(weights=weights)
    norms = 5 * 64 * 2  # five, 16 bits each; they are no weight matrices
    stored = engine.model.num_weight_bytes + norms
    assert stored / 3 < least_weight_bytes(engine.model_config, weights) <= stored
