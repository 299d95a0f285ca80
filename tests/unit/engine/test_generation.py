"""The engine's greedy answers equal transformers' token for token, however the work is cut up."""

from __future__ import annotations

import pytest
import torch

from engine.engine import Engine
from engine.sequence import Sequence
from engine.warm_up import warm_up
from tests.unit.engine.tiny_llama import (
    MAX_LEN,
    TinyLlama,
    finish_ended,
    generate,
    new_sequence,
    random_prompt,
)

BLOCK_SIZE = 16
NUM_TOKENS = 12


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49])
def test_answers_equal_transformers_at_every_block_boundary(
    tiny_llama: TinyLlama, length: int
) -> None:
    prompt = random_prompt(length, seed=1)
    engine = tiny_llama.engine(block_size=BLOCK_SIZE)
    (answer,) = generate(engine, new_sequence(prompt, NUM_TOKENS))
    assert answer == tiny_llama.greedy(prompt, NUM_TOKENS)


@pytest.mark.parametrize("budget", [1, 7, 16, 512])
def test_the_chunk_budget_does_not_change_the_answer(tiny_llama: TinyLlama, budget: int) -> None:
    engine = tiny_llama.engine(max_batched_tokens=budget)
    prompts = [random_prompt(length, seed=2) for length in (31, 32, 33, 70)]
    answers = generate(engine, *(new_sequence(prompt, NUM_TOKENS) for prompt in prompts))
    assert answers == [tiny_llama.greedy(prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("block_size", [16, 32])
def test_the_block_size_does_not_change_the_answer(tiny_llama: TinyLlama, block_size: int) -> None:
    prompt = random_prompt(block_size + 5, seed=3)
    engine = tiny_llama.engine(block_size=block_size)
    (answer,) = generate(engine, new_sequence(prompt, NUM_TOKENS))
    assert answer == tiny_llama.greedy(prompt, NUM_TOKENS)


def test_the_context_can_be_filled_to_the_models_limit(tiny_llama: TinyLlama) -> None:
    prompt = random_prompt(MAX_LEN - NUM_TOKENS, seed=4)
    engine = tiny_llama.engine(kv_blocks=MAX_LEN // BLOCK_SIZE)
    assert engine.max_sequence_tokens == MAX_LEN
    (answer,) = generate(engine, new_sequence(prompt, NUM_TOKENS))
    assert answer == tiny_llama.greedy(prompt, NUM_TOKENS)


@pytest.mark.parametrize("remainder", range(BLOCK_SIZE))
def test_a_prompt_found_in_the_prefix_cache_gets_the_same_answer(
    tiny_llama: TinyLlama, remainder: int
) -> None:
    prompt = random_prompt(2 * BLOCK_SIZE + remainder, seed=5)
    engine = tiny_llama.engine()
    (first,) = generate(engine, new_sequence(prompt, NUM_TOKENS))
    again = new_sequence(prompt, NUM_TOKENS)
    (second,) = generate(engine, again)
    assert again.num_cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert second == first == tiny_llama.greedy(prompt, NUM_TOKENS)


def test_a_conversation_continues_from_its_cached_answer(tiny_llama: TinyLlama) -> None:
    engine = tiny_llama.engine()
    prompt = random_prompt(20, seed=6)
    (answer,) = generate(engine, new_sequence(prompt, 20))
    follow_up = prompt + answer + random_prompt(5, seed=7)
    sequence = new_sequence(follow_up, NUM_TOKENS)
    (second,) = generate(engine, sequence)
    assert sequence.num_cached_tokens == 32  # the last answer token's KV was never computed
    assert second == tiny_llama.greedy(follow_up, NUM_TOKENS)


def test_another_salt_finds_nothing_in_the_cache(tiny_llama: TinyLlama) -> None:
    engine = tiny_llama.engine()
    prompt = random_prompt(40, seed=8)
    generate(engine, new_sequence(prompt, 4, cache_salt="a"))
    other, same = new_sequence(prompt, 4, cache_salt="b"), new_sequence(prompt, 4, cache_salt="a")
    answers = generate(engine, other, same)
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 32)
    assert answers[0] == answers[1] == tiny_llama.greedy(prompt, 4)


def test_preempted_sequences_answer_as_if_alone(tiny_llama: TinyLlama) -> None:
    engine = tiny_llama.engine(kv_blocks=6, max_batched_tokens=24)
    prompts = [random_prompt(length, seed=9) for length in (15, 29, 33, 16)]
    sequences = [
        new_sequence(prompt, 30, arrival_s=float(order)) for order, prompt in enumerate(prompts)
    ]
    answers = generate(engine, *sequences)
    assert engine.scheduler.num_preemptions > 0
    assert answers == [tiny_llama.greedy(prompt, 30) for prompt in prompts]


def test_a_pool_of_one_requests_worth_serves_many_in_turn(tiny_llama: TinyLlama) -> None:
    engine = tiny_llama.engine(kv_blocks=2)
    prompts = [random_prompt(20, seed=seed) for seed in range(10, 14)]
    answers = generate(engine, *(new_sequence(prompt, NUM_TOKENS) for prompt in prompts))
    assert answers == [tiny_llama.greedy(prompt, NUM_TOKENS) for prompt in prompts]


def test_sequences_that_join_and_leave_do_not_disturb_each_other(tiny_llama: TinyLlama) -> None:
    engine = tiny_llama.engine(max_batched_tokens=32, max_num_seqs=4)
    arrivals = {
        step: new_sequence(random_prompt(5 + 7 * step, seed=14), 3 + 2 * (step % 5))
        for step in range(0, 16, 2)
    }
    _step_with_arrivals(engine, arrivals)
    for sequence in arrivals.values():
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        expected = tiny_llama.greedy(prompt, sequence.sampling.max_tokens)
        assert sequence.token_ids[len(prompt) :] == expected


def _step_with_arrivals(engine: Engine, arrivals: dict[int, Sequence]) -> None:
    for step in range(max(arrivals) + 1):
        if step in arrivals:
            engine.scheduler.add(arrivals[step])
        for result in engine.step().results:
            if result.sequence.finish_reason is not None:
                engine.scheduler.finish(result.sequence)
    finish_ended(engine)


def test_an_aborted_sequence_leaves_the_others_their_answers(tiny_llama: TinyLlama) -> None:
    engine = tiny_llama.engine()
    stays = new_sequence(random_prompt(19, seed=15), NUM_TOKENS)
    leaves = new_sequence(random_prompt(23, seed=16), NUM_TOKENS)
    engine.scheduler.add(stays)
    engine.scheduler.add(leaves)
    for _ in range(4):
        engine.step()
    engine.scheduler.finish(leaves)
    finish_ended(engine)
    assert stays.token_ids[19:] == tiny_llama.greedy(stays.token_ids[:19], NUM_TOKENS)


def test_a_replayed_request_goes_on_where_it_stopped(tiny_llama: TinyLlama) -> None:
    prompt = random_prompt(21, seed=17)
    drawn = new_sequence(prompt, NUM_TOKENS, temperature=1.5, seed=99)
    (whole,) = generate(tiny_llama.engine(), drawn)
    replay = new_sequence(prompt, NUM_TOKENS, temperature=1.5, seed=99)
    replay.token_ids += whole[:5]
    generate(tiny_llama.engine(), replay)
    assert replay.token_ids[len(prompt) :] == whole
    assert replay.finish_reason == "length"


def test_logprobs_are_the_log_softmax_of_transformers_logits(tiny_llama: TinyLlama) -> None:
    prompt = random_prompt(18, seed=18)
    engine = tiny_llama.engine()
    sequence = new_sequence(prompt, 1, num_logprobs=3)
    engine.scheduler.add(sequence)
    (result,) = engine.step().results
    expected = tiny_llama.logits(prompt)[-1].double().log_softmax(0)
    logprobs = result.token.logprobs
    assert logprobs is not None
    values, ids = expected.topk(3)
    assert [token for token, _ in logprobs.top] == ids.tolist()
    torch.testing.assert_close(
        torch.tensor([value for _, value in logprobs.top], dtype=torch.float64),
        values, atol=1e-4, rtol=0,
    )  # fmt: skip


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_quantised_answer_does_not_depend_on_the_batch(
    tiny_llama: TinyLlama, weights: str
) -> None:
    prompts = [random_prompt(length, seed=19) for length in (9, 17, 40)]
    together = generate(
        tiny_llama.engine(weights=weights), *(new_sequence(prompt) for prompt in prompts)
    )
    alone = [
        generate(tiny_llama.engine(weights=weights), new_sequence(prompt))[0] for prompt in prompts
    ]
    assert together == alone


def test_warm_up_leaves_no_trace(tiny_llama: TinyLlama) -> None:
    engine = tiny_llama.engine(kv_blocks=8)
    warm_up(engine)
    pool = engine.scheduler.pool
    pool.check_integrity()
    assert pool.num_free == pool.num_blocks
    assert not engine.scheduler.has_work
    assert engine.step_time_s == engine.tokens_per_s == 0.0
    assert engine.num_forwards == 6, "the second time measures what the first has compiled"
    probe = new_sequence([0] * 40, 1, cache_salt="warm-up")
    generate(engine, probe)
    assert probe.num_cached_tokens == 0


def test_prompts_are_cut_by_the_measured_time(tiny_llama: TinyLlama) -> None:
    engine = tiny_llama.engine(max_step_ms=1000.0)
    for _ in range(8):
        engine.pace.observe(100, 4.0)
    sequence = new_sequence(random_prompt(200, seed=12), 4)
    engine.scheduler.add(sequence)
    engine.step()
    assert sequence.num_computed_tokens == 25
    finish_ended(engine)
    assert sequence.token_ids[200:] == tiny_llama.greedy(sequence.token_ids[:200], 4)
    assert engine.pace.limit_tokens() != 25, "these steps were measured, too"
