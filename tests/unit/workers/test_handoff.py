"""An answer computed by two workers equals the answer of one engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.engine.tiny_llama import TinyLlama, generate, new_sequence, random_prompt
from tests.unit.workers.worker_pair import WorkerPair

BLOCK_SIZE = 16


def make_pair(
    tiny_llama: TinyLlama, prefill: dict[str, Any] | None = None, **decode: Any
) -> WorkerPair:
    return WorkerPair(
        tiny_llama.engine(role="prefill", **(prefill or {})), tiny_llama.engine(**decode)
    )


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 70])
@pytest.mark.parametrize("budget", [1, 15, 16, 512])
def test_the_answer_equals_that_of_one_engine(
    tiny_llama: TinyLlama, length: int, budget: int
) -> None:
    pair = make_pair(tiny_llama, {"max_batched_tokens": budget})
    prompt = random_prompt(length, seed=31)
    pair.submit("a", prompt, 10)
    pair.run()
    assert pair.tokens("a") == tiny_llama.greedy(prompt, 10)
    assert pair.outputs["a"][-1].finish_reason == "length"
    assert not pair.failures
    pair.check_everything_is_free()


def test_many_requests_at_once(tiny_llama: TinyLlama) -> None:
    pair = make_pair(tiny_llama, {"max_batched_tokens": 40})
    prompts = {f"r{i}": random_prompt(3 + 11 * i, seed=32) for i in range(8)}
    for name, prompt in prompts.items():
        pair.submit(name, prompt, 5 + len(name))
    pair.run()
    for name, prompt in prompts.items():
        assert pair.tokens(name) == tiny_llama.greedy(prompt, 5 + len(name))
    pair.check_everything_is_free()


def test_a_decode_pool_too_small_for_all_preempts_and_recomputes(tiny_llama: TinyLlama) -> None:
    pair = make_pair(tiny_llama, kv_blocks=6)
    prompts = {f"r{i}": random_prompt(20 + i, seed=33) for i in range(4)}
    for name, prompt in prompts.items():
        pair.submit(name, prompt, 40)
    pair.run()
    assert pair.engines[1].scheduler.num_preemptions > 0
    for name, prompt in prompts.items():
        assert pair.tokens(name) == tiny_llama.greedy(prompt, 40)
    pair.check_everything_is_free()


@pytest.mark.parametrize(("p_blocks", "d_blocks"), [(4, 64), (64, 5), (4, 5)])
def test_pools_of_hardly_more_than_one_request(
    tiny_llama: TinyLlama, p_blocks: int, d_blocks: int
) -> None:
    pair = make_pair(tiny_llama, {"kv_blocks": p_blocks}, kv_blocks=d_blocks)
    prompts = {f"r{i}": random_prompt(50, seed=40 + i) for i in range(4)}
    for name, prompt in prompts.items():
        pair.submit(name, prompt, 8)
    pair.run()
    for name, prompt in prompts.items():
        if name not in pair.failures:
            assert pair.tokens(name) == tiny_llama.greedy(prompt, 8)
        assert all(failure.retryable for failure in pair.failures.get(name, []))
    assert len(pair.failures) < len(prompts)
    pair.check_everything_is_free()


def test_only_what_the_decode_worker_lacks_is_sent(tiny_llama: TinyLlama) -> None:
    pair = make_pair(tiny_llama)
    prompt = random_prompt(40, seed=34)
    pair.submit("first", prompt, 6)
    pair.run()
    pair.submit("second", prompt, 6)
    pair.run()
    assert pair.tokens("second") == pair.tokens("first") == tiny_llama.greedy(prompt, 6)
    by_leg = [output.num_cached_tokens for output in pair.outputs["second"]]
    assert by_leg[:2] == [32, 32]
    pair.check_everything_is_free()


@pytest.mark.parametrize("stop", ["length", "stop"])
def test_an_answer_that_ends_at_its_first_token_transfers_nothing(
    tiny_llama: TinyLlama, stop: str
) -> None:
    pair = make_pair(tiny_llama)
    prompt = random_prompt(40, seed=35)
    (first,) = tiny_llama.greedy(prompt, 1)
    if stop == "stop":
        pair.submit("a", prompt, 10, stop_token_ids=(first,))
    else:
        pair.submit("a", prompt, 1)
    before = pair.engines[1].kv_memory.raw.clone()
    pair.run()
    assert pair.tokens("a") == [first]
    assert [output.finish_reason for output in pair.outputs["a"]] == [stop]
    assert pair.engines[1].kv_memory.raw.equal(before)
    pair.check_everything_is_free()


def test_a_stop_token_ends_the_answer_on_the_decode_worker(tiny_llama: TinyLlama) -> None:
    pair = make_pair(tiny_llama)
    prompt = random_prompt(21, seed=36)
    expected = tiny_llama.greedy(prompt, 10)
    stop = expected[6]
    pair.submit("a", prompt, 10, stop_token_ids=(stop,))
    pair.run()
    assert pair.tokens("a") == expected[: expected.index(stop) + 1]
    pair.check_everything_is_free()


def test_seeded_sampling_does_not_notice_the_handoff(tiny_llama: TinyLlama) -> None:
    prompt = random_prompt(23, seed=37)
    options: dict[str, Any] = {"temperature": 1.4, "seed": 5, "frequency_penalty": 0.5}
    (alone,) = generate(tiny_llama.engine(), new_sequence(prompt, 12, **options))
    pair = make_pair(tiny_llama)
    pair.submit("a", prompt, 12, **options)
    pair.run()
    assert pair.tokens("a") == alone


def test_samples_of_one_prompt_share_its_kv(tiny_llama: TinyLlama) -> None:
    pair = make_pair(tiny_llama)
    prompt = random_prompt(40, seed=38)
    for sample in range(3):
        pair.submit(
            f"s{sample}", prompt, 8, after="s0" if sample else "", temperature=1.2, seed=sample
        )
    pair.run()
    for sample in range(3):
        sequence = new_sequence(prompt, 8, temperature=1.2, seed=sample)
        assert pair.tokens(f"s{sample}") == generate(tiny_llama.engine(), sequence)[0]
        assert pair.outputs[f"s{sample}"][0].num_cached_tokens == (32 if sample else 0)
    pair.check_everything_is_free()


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_workers_agree_with_one_quantised_engine(
    tiny_llama: TinyLlama, weights: str
) -> None:
    prompt = random_prompt(35, seed=39)
    (alone,) = generate(tiny_llama.engine(weights=weights), new_sequence(prompt, 12))
    pair = make_pair(tiny_llama, {"weights": weights}, weights=weights)
    pair.submit("a", prompt, 12)
    pair.run()
    assert pair.tokens("a") == alone
