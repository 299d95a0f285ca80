"""Several ranks give the tokens of one, for every architecture, with the collectives we counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers

from engine.backends.cpu.backend import CpuBackend, WeightScheme
from engine.device import ON_CPU
from engine.engine import Engine
from engine.kv_geometry import kv_spec
from engine.tensor_parallel.shard import plan_shard
from engine.weights.hf_config import config_from_hf
from mesh.config import WorkerConfig
from mesh.errors import ConfigError
from tests.unit.engine.families import FAMILIES, SHAPE
from tests.unit.engine.ranks import Ranks
from tests.unit.engine.tiny_llama import TinyLlama, generate, new_sequence, random_prompt
from worker.followers.rank_setup import RankReady
from worker.start import _cpu_backend, start_followers

_PADDED = {**SHAPE, "vocab_size": 321}
_CASES: dict[str, tuple[transformers.PretrainedConfig, int]] = {
    **{
        f"{family}-2": (FAMILIES[family], 2)
        for family in (
            "llama-bias-untied", "mistral-window", "qwen2", "qwen3", "gemma3", "qwen3-moe",
        )
    },
    "padded-vocabulary-2": (transformers.LlamaConfig(**_PADDED, tie_word_embeddings=True), 2),
    "replicated-heads-4": (FAMILIES["qwen2"], 4),
    "replicated-heads-moe-4": (FAMILIES["qwen3-moe"], 4),
}  # fmt: skip
_PROMPT_LENGTHS = (1, 15, 17, 40, 90)


def _config(folder: Path | str, **fields: Any) -> WorkerConfig:
    defaults: dict[str, Any] = {
        "kv_blocks": 64, "max_batched_tokens": 48, "max_step_ms": 0.0, "weights": "fp32",
    }  # fmt: skip
    return WorkerConfig(
        role="decode",
        worker_id="test",
        redis_url="redis://127.0.0.1:1/0",
        model=str(folder),
        **{**defaults, **fields},
    )


def _save(config: transformers.PretrainedConfig, folder: Path) -> None:
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.save_pretrained(folder)


def _answers(engine: Engine) -> list[list[int]]:
    prompts = [random_prompt(length, seed=3) for length in _PROMPT_LENGTHS]
    return generate(engine, *(new_sequence(prompt, 10) for prompt in prompts))


@pytest.mark.parametrize("case", _CASES)
def test_ranks_give_the_tokens_of_one(case: str, tmp_path: Path) -> None:
    model, size = _CASES[case]
    _save(model, tmp_path)
    config = _config(tmp_path)
    alone = Engine(config, CpuBackend("fp32", 2))
    expected = _answers(alone)
    assert len({tuple(answer) for answer in expected}) == len(expected)
    with Ranks(config, size) as ranks:
        assert _answers(ranks.lead) == expected
        num_kv_heads = max(1, model.num_key_value_heads // size)
        assert [engine.kv_spec.num_kv_heads for engine in ranks.engines] == [num_kv_heads] * size
        assert {engine.fingerprint for engine in ranks.engines} == {alone.fingerprint}


def test_two_all_reduces_a_layer(tiny_llama: TinyLlama) -> None:
    with Ranks(_config(tiny_llama.folder), 2) as ranks:
        sequence = new_sequence(random_prompt(20, seed=1), max_tokens=5)
        for engine in ranks.engines:
            engine.group.num_all_reduces = engine.group.num_gathers = 0
        assert generate(ranks.lead, sequence) == [tiny_llama.greedy(sequence.token_ids[:20], 5)]
        num_steps = ranks.lead.num_forwards
        assert num_steps == 5
    num_layers = 2
    for engine in ranks.engines:
        assert engine.group.num_all_reduces == num_steps * (1 + 2 * num_layers)
        assert engine.group.num_gathers == num_steps


def test_a_chunk_that_samples_nothing_gathers_nothing(tiny_llama: TinyLlama) -> None:
    with Ranks(_config(tiny_llama.folder, max_batched_tokens=16), 2) as ranks:
        sequence = new_sequence(random_prompt(40, seed=1), max_tokens=1)
        generate(ranks.lead, sequence)
        assert ranks.lead.num_forwards == 3
    assert [engine.group.num_gathers for engine in ranks.engines] == [1, 1]


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_weights_are_the_same_codes(weights: WeightScheme, tmp_path: Path) -> None:
    # 4 heads of 32 and 128 inner columns: a rank's share is whole groups
    _save(transformers.LlamaConfig(**{**SHAPE, "intermediate_size": 128}), tmp_path)
    config = _config(tmp_path, weights=weights)
    alone = Engine(config, CpuBackend(weights, 2)).model
    with Ranks(config, 2) as ranks:
        parts = [engine.model for engine in ranks.engines]
    for layer, whole in enumerate(alone._layers):
        for name in ("output", "down"):
            codes = [_packed(part._layers[layer], name) for part in parts]
            assert np.array_equal(np.concatenate(codes, axis=1), _packed(whole, name))


def _packed(layer: Any, name: str) -> Any:
    return (layer.output if name == "output" else layer.mlp.down).packed


@pytest.mark.parametrize(
    ("shape", "size", "weights", "numbers"),
    [
        ({"num_heads": 9, "num_kv_heads": 3}, 2, "fp32", "9 = 4 x 2 + 1"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "fp32", "3 KV heads"),
        ({"intermediate_size": 97}, 2, "fp32", "97 = 48 x 2 + 1"),
        ({"intermediate_size": 96}, 2, "int4", "96 / 2 ranks = 48"),
        ({"num_heads": 4, "head_dim": 16}, 4, "int8", "4 heads / 4 ranks x 16 = 16"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_numbers(
    shape: dict[str, int], size: int, weights: str, numbers: str
) -> None:
    plain = config_from_hf(transformers.LlamaConfig(**SHAPE).to_dict())
    config = msgspec.structs.replace(plain, **shape)
    plan_shard(config, 0, 1, weights)
    with pytest.raises(ConfigError, match="tensor_parallel: ") as refused:
        plan_shard(config, size - 1, size, weights)
    assert numbers in str(refused.value)


def test_it_is_refused_before_any_process_starts() -> None:
    config = _config("", tensor_parallel=2)
    with pytest.raises(ConfigError, match=r"9 attention heads .* among 2 ranks: 9 = 4 x 2 \+ 1"):
        start_followers(config, ON_CPU, "no.such.module", RankReady, epoch=1)


@pytest.mark.parametrize(("threads", "size", "each"), [(8, 2, 4), (3, 2, 1), (1, 4, 1)])
def test_threads_are_a_workers_and_divided(threads: int, size: int, each: int) -> None:
    config = _config("", threads=threads, tensor_parallel=size)
    assert _cpu_backend(config)._num_threads == each


def test_ranks_without_a_cores_file_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(12)))
    assert _cpu_backend(_config("", tensor_parallel=4))._num_threads == 3


@pytest.mark.parametrize(("size", "num_blocks"), [(1, 42), (2, 42), (4, 21)])
def test_the_pools_memory_is_a_workers_and_divided(size: int, num_blocks: int) -> None:
    # a block: 3 layers x 2 x 2 heads x 16 slots x 32 x 4 bytes = 24 KiB; with 4 ranks of 1 head
    # each, every head is held twice
    model = config_from_hf(transformers.LlamaConfig(**SHAPE).to_dict())
    config = _config("", kv_blocks=0, kv_memory_mib=1)
    assert kv_spec(config, model, plan_shard(model, 0, size), "fp32").num_blocks == num_blocks
