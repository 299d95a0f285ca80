"""Outputs follow their grammars whatever happens to the sequence, and hold nobody else up."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine.engine import Engine
from engine.sequence import Sequence
from mesh.errors import GrammarFailed
from tests.unit.engine.characters import END_ID, CharacterLlama, text, tokens_of
from tests.unit.engine.tiny_llama import TinyLlama, generate, new_sequence, random_prompt

PATTERN = r"[a-z]{3}-[0-9]{2,4}( x| yy){0,3}"
GRAMMAR = f"start: /{PATTERN}/"
PROMPT = random_prompt(20, seed=81)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> CharacterLlama:
    return CharacterLlama(tmp_path_factory.mktemp("characters"))


def with_grammar(prompt: list[int] = PROMPT, grammar: str = GRAMMAR, **fields: Any) -> Sequence:
    fields = {"stop_token_ids": (END_ID,), "max_tokens": 40, **fields}
    return new_sequence(prompt, grammar=grammar, **fields)


def run(engine: Engine, *sequences: Sequence) -> list[list[int]]:
    for sequence in sequences:
        attach(engine, sequence)
    return generate(engine, *sequences)


def attach(engine: Engine, sequence: Sequence) -> None:
    """Attach, and wait until it is compiled."""
    engine.grammars.attach(sequence)
    if sequence.grammar_state is not None:
        sequence.grammar_state.result(10.0)


@contextmanager
def busy(engine: Engine, name: str) -> Iterator[None]:
    """One of the grammar threads has something else to do."""
    engine.grammars.prepare()
    over = threading.Event()
    getattr(engine.grammars, name).submit(over.wait)
    try:
        yield
    finally:
        over.set()


def wait_for(engine: Engine, name: str) -> None:
    getattr(engine.grammars, name).submit(int).result(10.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_outputs_follow_the_grammar_and_end_with_it(
    llama: CharacterLlama, temperature: float
) -> None:
    sequences = [with_grammar(temperature=temperature, seed=seed) for seed in range(20)]
    answers = run(llama.engine(), *sequences)
    for sequence, answer in zip(sequences, answers, strict=True):
        assert re.fullmatch(PATTERN, text(answer))
        assert answer[-1] == END_ID
        assert sequence.finish_reason == "stop"
    assert len(set(map(tuple, answers))) == (1 if temperature == 0 else 20)


def test_free_rows_beside_one_with_a_grammar_are_the_same(llama: CharacterLlama) -> None:
    prompts = [random_prompt(length, seed=82) for length in (5, 17, 30)]
    free = [new_sequence(prompt, 12) for prompt in prompts]
    answers = run(llama.engine(), free[0], with_grammar(), *free[1:])
    del answers[1]
    assert answers == [llama.greedy(prompt, 12) for prompt in prompts]


def test_preempted_sequences_go_on_in_the_grammar(llama: CharacterLlama) -> None:
    prompts = [random_prompt(length, seed=83) for length in (15, 29, 33, 16)]
    grammar = "start: /[a-z]{28}/"
    alone = [run(llama.engine(), with_grammar(prompt, grammar))[0] for prompt in prompts]
    engine = llama.engine(kv_blocks=6, max_batched_tokens=24)
    sequences = [
        with_grammar(prompt, grammar, arrival_s=float(i)) for i, prompt in enumerate(prompts)
    ]
    assert run(engine, *sequences) == alone
    assert engine.scheduler.num_preemptions > 0


def test_a_replay_goes_on_where_the_output_was(llama: CharacterLlama) -> None:
    whole = with_grammar(temperature=1.0, seed=5)
    run(llama.engine(), whole)
    for cut in range(len(whole.token_ids) - len(PROMPT)):
        again = with_grammar(temperature=1.0, seed=5)
        again.token_ids = whole.token_ids[: len(PROMPT) + cut]
        run(llama.engine(), again)
        assert again.token_ids == whole.token_ids
        assert again.finish_reason == "stop"


def test_others_run_while_a_grammar_is_compiled(llama: CharacterLlama) -> None:
    engine = llama.engine()
    sequence, free = with_grammar(), new_sequence(PROMPT, 6)
    with busy(engine, "_compiler"):
        engine.grammars.attach(sequence)
        engine.scheduler.add(sequence)
        engine.scheduler.add(free)
        for _ in range(6):
            engine.step()
        assert free.finish_reason == "length"
        assert sequence.num_output_tokens == 0
        engine.scheduler.finish(free)
    wait_for(engine, "_compiler")
    assert generate_rest(engine, sequence) == run(llama.engine(), with_grammar())[0]


def test_others_run_while_a_mask_is_late(llama: CharacterLlama) -> None:
    engine = llama.engine()
    sequence, free = with_grammar(), new_sequence(PROMPT, 12)
    attach(engine, sequence)
    engine.scheduler.add(sequence)
    engine.scheduler.add(free)
    for _ in range(3):
        engine.step()
    so_far = list(sequence.token_ids)
    with busy(engine, "_masker"):
        for _ in range(4):
            engine.step()
        assert sequence.token_ids == so_far
        assert engine.grammars.num_late == 1
        assert sequence.num_uncomputed_tokens == 1
        assert free.num_output_tokens == 7
    wait_for(engine, "_masker")
    answer = generate_rest(engine, sequence, free)
    assert answer == run(llama.engine(), with_grammar())[0]
    assert free.token_ids[len(PROMPT) :] == llama.greedy(PROMPT, 12)


def generate_rest(engine: Engine, sequence: Sequence, *others: Sequence) -> list[int]:
    while engine.scheduler.has_work:
        for result in engine.step().results:
            if result.sequence.finish_reason is not None:
                engine.scheduler.finish(result.sequence)
    assert all(other.finish_reason for other in others)
    return sequence.token_ids[sequence.num_prompt_tokens :]


def test_aborting_cancels_what_waits_for_the_compiler(llama: CharacterLlama) -> None:
    engine = llama.engine()
    sequence = with_grammar()
    with busy(engine, "_compiler"):
        engine.grammars.attach(sequence)
        engine.scheduler.add(sequence)
        engine.scheduler.finish(sequence)
        assert not sequence.awaits_grammar, "its job was not cancelled"


def test_stop_tokens_pass_only_where_the_grammar_ends(llama: CharacterLlama) -> None:
    bias = ((END_ID, 100.0),)
    (answer,) = run(llama.engine(), with_grammar(logit_bias=bias))
    assert re.fullmatch(r"[a-z]{3}-[0-9]{2}", text(answer)), "it ends as soon as it may"


def test_min_tokens_within_what_the_grammar_can_say(llama: CharacterLlama) -> None:
    bias = ((END_ID, 100.0),)
    (longer,) = run(llama.engine(), with_grammar(logit_bias=bias, min_tokens=8))
    assert re.fullmatch(PATTERN, text(longer))
    assert 8 <= len(text(longer)) <= 9, "it ends at the first place after min_tokens"
    ended = with_grammar(grammar='start: "abc"', min_tokens=30)
    (answer,) = run(llama.engine(), ended)
    assert (text(answer), ended.finish_reason) == ("abc", "stop")


def test_a_stop_token_of_the_request_ends_the_text(llama: CharacterLlama) -> None:
    stop = tokens_of("-")[0]
    (answer,) = run(llama.engine(), with_grammar(stop_token_ids=(stop, END_ID)))
    assert re.fullmatch("[a-z]{3}-", text(answer))


@pytest.mark.parametrize("grammar", ["start: /(/", "start: other", 'start: "é"', "start: /a(?=b)/"])
def test_what_cannot_be_followed_fails_and_leaves_the_others(
    llama: CharacterLlama, grammar: str
) -> None:
    engine = llama.engine()
    sequence, free = with_grammar(grammar=grammar), new_sequence(PROMPT, 4)
    engine.grammars.attach(sequence)
    engine.scheduler.add(sequence)
    engine.scheduler.add(free)
    wait_for(engine, "_compiler")
    outcome = engine.step()
    ((failed, error),) = outcome.failed
    assert failed is sequence
    assert isinstance(error, GrammarFailed)
    engine.scheduler.finish(sequence)
    generate_rest(engine, free)
    assert free.token_ids[len(PROMPT) :] == llama.greedy(PROMPT, 4)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


class Panic(BaseException):
    """As Rust's reach Python: no Exception."""


def test_a_panic_of_the_library_fails_its_request_only(
    llama: CharacterLlama,
) -> None:
    engine = llama.engine()
    sequence, free = with_grammar(), new_sequence(PROMPT, 4)
    attach(engine, sequence)
    assert sequence.grammar_state is not None

    class Panicking:
        def compute_bitmask(self) -> bytes:
            raise Panic

    sequence.grammar_state.adopt(Panicking())  # type: ignore[arg-type]
    engine.scheduler.add(sequence)
    engine.scheduler.add(free)
    ((failed, _),) = engine.step().failed
    engine.scheduler.finish(failed)
    assert failed is sequence
    generate_rest(engine, free)
    assert free.token_ids[len(PROMPT) :] == llama.greedy(PROMPT, 4)


def test_a_model_without_tokenizer_follows_no_grammar(tiny_llama: TinyLlama) -> None:
    engine = tiny_llama.engine()
    sequence = with_grammar()
    engine.grammars.attach(sequence)
    assert sequence.grammar_state is not None
    with pytest.raises(GrammarFailed, match="tokenizer"):
        sequence.grammar_state.result(10.0)


def test_no_thread_before_the_first_grammar(llama: CharacterLlama) -> None:
    engine = llama.engine()
    run(engine, new_sequence(PROMPT, 2))
    assert engine.grammars._compiler is None
