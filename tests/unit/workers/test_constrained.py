"""A grammar's state on two workers: P samples the first token, D goes on from it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.unit.engine.characters import END_ID, CharacterLlama, text
from tests.unit.engine.tiny_llama import random_prompt
from tests.unit.workers.worker_pair import WorkerPair

PROMPT = random_prompt(40, seed=91)
PATTERN = r"[a-z]{3}-[0-9]{2,4}"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> CharacterLlama:
    return CharacterLlama(tmp_path_factory.mktemp("characters"))


@pytest.fixture
def pair(llama: CharacterLlama) -> WorkerPair:
    return WorkerPair(llama.engine(role="prefill"), llama.engine())


def submit(
    pair: WorkerPair, name: str, grammar: str = f"start: /{PATTERN}/", **fields: Any
) -> None:
    fields = {"stop_token_ids": (END_ID,), "temperature": 1.0, **fields}
    pair.submit(name, PROMPT, 20, grammar=grammar, **fields)


def run(pair: WorkerPair) -> None:
    """Both workers take what was submitted; when their compilers have, everything moves."""
    pair.p_step()
    pair.d_step()
    for engine in pair.engines:
        engine.grammars.prepare()
        engine.grammars._compiler.submit(int).result(10.0)
    pair.run()
    pair.check_everything_is_free()


def test_the_hand_off_keeps_the_place_in_the_grammar(pair: WorkerPair) -> None:
    for seed in range(6):
        submit(pair, f"r{seed}", seed=seed)
    run(pair)
    answers = [pair.tokens(f"r{seed}") for seed in range(6)]
    for answer in answers:
        assert re.fullmatch(PATTERN, text(answer))
        assert answer[-1] == END_ID
    assert len(set(map(tuple, answers))) > 1


def test_siblings_follow_it_too(pair: WorkerPair) -> None:
    submit(pair, "first", seed=1)
    for seed in (2, 3):
        submit(pair, f"s{seed}", seed=seed, after="first")
    run(pair)
    for name in ("first", "s2", "s3"):
        assert re.fullmatch(PATTERN, text(pair.tokens(name)))


def test_a_grammar_that_ends_with_the_first_token(pair: WorkerPair) -> None:
    submit(pair, "empty", grammar='start: ""')
    run(pair)
    assert pair.tokens("empty") == [END_ID]


def test_a_broken_grammar_fails_the_request_and_frees_it(pair: WorkerPair) -> None:
    submit(pair, "broken", grammar="start: /(/")
    run(pair)
    first = pair.failures["broken"][0]
    assert (first.code, first.retryable) == ("grammar_failed", False)
