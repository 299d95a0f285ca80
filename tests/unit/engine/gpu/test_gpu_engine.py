"""The whole engine on the GPU's kernels gives the CPU backend's tokens."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.backend import StepSizes
from engine.backends.cpu.backend import CpuBackend
from engine.backends.gpu.compile_ahead import steps_to_compile
from engine.backends.gpu.linears import WeightScheme
from engine.engine import Engine
from engine.profiling.session import ProfileData, ProfileSession
from engine.sequence import Sequence
from engine.warm_up import warm_up
from mesh.config import KVDtype, WorkerConfig
from tests.unit.engine.families import random_model
from tests.unit.engine.gpu.gpu_engines import gpu_engine, runner
from tests.unit.engine.test_gpu_profile import Meter
from tests.unit.engine.tiny_llama import (
    TinyLlama,
    finish_ended,
    generate,
    new_sequence,
    random_prompt,
)

NUM_TOKENS = 4


@pytest.fixture(scope="module")
def engine(tiny_llama: TinyLlama) -> Engine:
    return gpu_engine(tiny_llama.folder)


def test_answers_equal_transformers_however_they_are_batched(
    tiny_llama: TinyLlama, engine: Engine
) -> None:
    prompts = [random_prompt(length, seed=1) for length in (1, 16, 17, 60)]
    before = runner(engine).num_replayed
    answers = generate(engine, *(new_sequence(prompt, NUM_TOKENS) for prompt in prompts))
    assert answers == [tiny_llama.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    assert runner(engine).num_replayed > before


@pytest.mark.parametrize(
    "family", ["llama-bias-untied", "mistral-window", "qwen3", "gemma3", "qwen3-moe"]
)
def test_every_family_answers_as_on_the_cpu(family: str, tmp_path: Path) -> None:
    random_model(family, tmp_path)
    prompts = [random_prompt(length, seed=2) for length in (1, 29)]
    engine = gpu_engine(tmp_path, max_batched_tokens=20, max_num_seqs=2)
    answers = generate(engine, *(new_sequence(prompt, NUM_TOKENS) for prompt in prompts))
    assert answers == _on_cpu(tmp_path, prompts)
    assert (runner(engine).num_replayed > 0) == (family != "qwen3-moe")


@pytest.mark.parametrize(
    ("weights", "bound"),
    [("bf16", 0.03), ("fp16", 0.004), ("int8", 0.03), ("w8a8", 0.04), ("int4", 0.25)],
)
def test_each_weight_scheme_stays_close_to_fp32(
    tiny_llama: TinyLlama, weights: WeightScheme, bound: float
) -> None:
    prompt = random_prompt(9, seed=3)
    logprobs = {}
    for scheme in ("fp32", weights):
        engine = gpu_engine(tiny_llama.folder, scheme, prepare=False)
        engine.scheduler.add(new_sequence(prompt, 1, num_logprobs=96))
        logprobs[scheme] = _all_logprobs(engine)
    exact = tiny_llama.logits(prompt)[-1].log_softmax(0)
    torch.testing.assert_close(logprobs["fp32"], exact, atol=1e-4, rtol=0)
    error = (logprobs[weights] - exact).abs().max() / exact.abs().max()
    assert 0 < error < bound


@pytest.mark.parametrize(("kv_dtype", "bound"), [("int8", 0.03), ("bf16", 0.03)])
def test_kv_of_fewer_bits_stays_close(
    tiny_llama: TinyLlama, kv_dtype: KVDtype, bound: float
) -> None:
    prompt = random_prompt(30, seed=4)
    engine = gpu_engine(tiny_llama.folder, kv_dtype=kv_dtype, prepare=False)
    assert engine.kv_spec.dtype == kv_dtype
    engine.scheduler.add(new_sequence(prompt, 2, num_logprobs=96))
    engine.step()
    exact = tiny_llama.logits([*prompt, *tiny_llama.greedy(prompt, 1)])[-1].log_softmax(0)
    error = (_all_logprobs(engine) - exact).abs().max() / exact.abs().max()
    assert 0 < error < bound


def test_a_graph_gives_what_separate_launches_give(tiny_llama: TinyLlama) -> None:
    """Batches of 1 to 3, padded to 1, 2, 4; random and greedy rows side by side."""
    answers = []
    for prepare in (True, False):
        engine = gpu_engine(tiny_llama.folder, prepare=prepare, max_num_seqs=4)
        sequences = [
            new_sequence(
                random_prompt(3 + index, seed=5), 3 + index,
                temperature=0.9 * (index % 2), seed=index, top_k=11 * (index == 1),
                top_p=0.9 if index else 1.0,
            )
            for index in range(3)
        ]  # fmt: skip
        answers.append(generate(engine, *sequences))
        assert (runner(engine).num_replayed == 4) == prepare
    assert answers[0] == answers[1]


def test_seeded_draws_are_the_cpus(tiny_llama: TinyLlama, engine: Engine) -> None:
    def sequences() -> list[Sequence]:
        return [
            new_sequence(random_prompt(8, seed=6), 5, temperature=1.3, seed=20 + index, **extra)
            for index, extra in enumerate(({}, {"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.1}))
        ]

    assert generate(engine, *sequences()) == generate(tiny_llama.engine(), *sequences())


def test_rows_of_the_host_do_not_disturb_those_of_the_device(
    tiny_llama: TinyLlama, engine: Engine
) -> None:
    prompts = [random_prompt(length, seed=7) for length in (7, 12, 5)]
    plain, asks, penalised = (new_sequence(prompt, NUM_TOKENS) for prompt in prompts)
    asks = new_sequence(prompts[1], NUM_TOKENS, num_logprobs=2)
    penalised = new_sequence(prompts[2], NUM_TOKENS, repetition_penalty=1.4)
    expected = new_sequence(prompts[2], NUM_TOKENS, repetition_penalty=1.4)
    generate(tiny_llama.engine(), expected)
    before = runner(engine).num_replayed
    answers = generate(engine, plain, asks, penalised)
    assert runner(engine).num_replayed == before + NUM_TOKENS - 1
    assert answers[:2] == [tiny_llama.greedy(prompt, NUM_TOKENS) for prompt in prompts[:2]]
    assert penalised.token_ids == expected.token_ids


def test_layers_are_reported_in_order_once_their_kv_is_there(tiny_llama: TinyLlama) -> None:
    engine = gpu_engine(tiny_llama.folder, kv_layer_groups=2, prepare=False)
    prompt = random_prompt(20, seed=8)
    engine.scheduler.add(new_sequence(prompt, 1))
    groups: list[int] = []
    engine.step(lambda chunks, group: groups.append(group))
    assert groups == [], "only launched"
    engine.step()
    assert groups == [0, 1]


def test_random_loads_with_few_blocks_and_aborts(tiny_llama: TinyLlama) -> None:
    rng = np.random.default_rng(9)
    engine = gpu_engine(tiny_llama.folder, kv_blocks=4, max_num_seqs=4, max_batched_tokens=20)
    sequences = [
        new_sequence(random_prompt(int(rng.integers(9, 20)), seed=9 + i), 9, arrival_s=float(i))
        for i in range(5)
    ]
    for sequence in sequences:
        engine.scheduler.add(sequence)
        engine.step()
    engine.scheduler.finish(sequences[1])
    finish_ended(engine)
    assert engine.scheduler.num_preemptions > 0
    for sequence in sequences[:1] + sequences[2:]:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        assert sequence.token_ids[len(prompt) :] == tiny_llama.greedy(prompt, 9)


def test_warm_up_captures_and_leaves_no_trace(tiny_llama: TinyLlama) -> None:
    engine = gpu_engine(tiny_llama.folder, prepare=False, max_num_seqs=2)
    warm_up(engine)
    assert runner(engine).num_replayed == 2, "it measures decodes as they will be"
    pool = engine.scheduler.pool
    assert pool.num_free == pool.num_blocks
    generate(engine, new_sequence([1, 2, 3], 3))
    assert runner(engine).num_replayed == 4


def test_a_profile_runs_op_by_op_and_changes_no_answer(tiny_llama: TinyLlama) -> None:
    engine = gpu_engine(tiny_llama.folder, "bf16", max_num_seqs=2)
    prompt = random_prompt(12, seed=11)
    (plain,) = generate(engine, new_sequence(prompt, 4, cache_salt="a"))
    replayed = runner(engine).num_replayed
    done: list[ProfileData] = []
    engine.profile = ProfileSession(engine, 4, time.monotonic() + 600, done.append)
    (profiled,) = generate(engine, new_sequence(prompt, 4, cache_salt="b"))
    assert profiled == plain
    assert runner(engine).num_replayed == replayed
    (data,) = done
    assert data.times.num_steps == 4
    assert data.limits is not None
    calls = {op: work.num_calls for (phase, op), work in data.log.work.items()}
    assert calls["attention"] == 3 * engine.model_config.num_layers


def test_the_cache_is_sized_by_the_largest_step(tiny_llama: TinyLlama) -> None:
    meter = Meter(size=1 << 30, before=1 << 20, at_most=2 << 20)
    engine = gpu_engine(tiny_llama.folder, meter=meter, kv_blocks=9, prepare=False)
    assert meter.runs == 1
    assert engine.kv_memory.raw.shape[0] == 9
    prompt = random_prompt(30, seed=10)
    (answer,) = generate(engine, new_sequence(prompt, 3))
    assert answer == tiny_llama.greedy(prompt, 3)


def test_steps_that_only_compile_leave_the_cache_alone(tiny_llama: TinyLlama) -> None:
    engine = gpu_engine(tiny_llama.folder, prepare=False)
    engine.kv_memory.raw.fill_(7)
    sizes = StepSizes(num_tokens=9, num_sequences=2, num_blocks=8, vocab_size=96)
    batches = steps_to_compile(sizes, block_size=16)
    assert [batch.num_tokens for batch in batches] == [9, 8, 5, 2, 9, 8, 5]
    runner(engine).compile(engine.model, batches[-2:])
    assert engine.kv_memory.raw.unique().tolist() == [7]


def _on_cpu(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    config = WorkerConfig(
        role="decode", worker_id="c", redis_url="redis://h", model=str(folder), weights="fp32",
        kv_blocks=32,
    )  # fmt: skip
    engine = Engine(config, CpuBackend("fp32", 2))
    return generate(engine, *(new_sequence(prompt, NUM_TOKENS) for prompt in prompts))


def _all_logprobs(engine: Engine) -> torch.Tensor:
    """[V] of the next token."""
    (result,) = engine.step().results
    found: Any = result.token.logprobs
    values = torch.empty(len(found.top))
    for token_id, logprob in found.top:
        values[token_id] = logprob
    return values
