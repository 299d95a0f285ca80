"""What clients may send as a grammar: it compiles, or it is refused, and never ends the process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mesh.errors import GrammarFailed
from mesh.model_text.grammar import MAX_GRAMMAR_BYTES, GrammarVocabulary, grammar_executor
from mesh.model_text.model_files import resolve_model
from mesh.model_text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model(""))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer, tokenizer.vocab_size + 3)


@pytest.fixture(scope="module")
def executor() -> Iterator[ThreadPoolExecutor]:
    executor = grammar_executor("grammar")
    yield executor
    executor.shutdown()


def mask(vocabulary: GrammarVocabulary, grammar: str) -> list[int]:
    bits = np.frombuffer(vocabulary.compile(grammar).compute_bitmask(), np.uint8)
    count = vocabulary.num_tokens + 1
    return np.flatnonzero(np.unpackbits(bits, count=count, bitorder="little")).tolist()


def test_special_and_padding_tokens_are_no_text(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    allowed = mask(vocabulary, r"start: /(.|\n)*/")
    assert vocabulary.end_id in allowed
    assert not set(allowed) & set(tokenizer.special_ids.values())
    assert max(token for token in allowed if token != vocabulary.end_id) < tokenizer.vocab_size
    assert len(allowed) > tokenizer.vocab_size * 0.9


def test_special_tokens_can_be_named(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    special = tokenizer.special_ids["<|im_start|>"]
    assert mask(vocabulary, f"start: <[{special}]>") == [special]


def test_only_what_the_grammar_says(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.token_bytes(token) for token in mask(vocabulary, 'start: "yes" | "yet"')]
    assert sorted(pieces) == [b"y", b"ye", b"yes", b"yet"]


CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(15_000)) + '\nr15000: "a"'
REFERENCES = {
    "$ref": "#/$defs/0",
    "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(6000)} | {"6000": {}},
}


@pytest.mark.parametrize(
    "grammar",
    [
        "start: " + "(" * 30_000 + '"a"' + ")" * 30_000,
        "start: /" + "(" * 30_000 + "a" + ")" * 30_000 + "/",
        CHAIN,
        CHAIN.upper().replace("START", "start"),
        "start: " + " | ".join(f'"{i}"' for i in range(20_000)),
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)) + '\nr60: "a"',
        "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)) + '\nT40: "a"',
        "start: /((a{1,1000}){1,1000}){1,1000}/",
        "start: start",
        "start: %json " + '{"items":' * 5000 + "{}" + "}" * 5000,
        "start: %json " + json.dumps(REFERENCES),
        'start: %json {"$ref": "#"}',
        'start: %json {"$ref": "http://127.0.0.1:1/x"}',
        'start: %json {"type": "string", "pattern": "^(.*a.{900}b)*$", "maxLength": 90000}',
        "\0\uffff",
        "x" * (MAX_GRAMMAR_BYTES + 1),
        "é" * (MAX_GRAMMAR_BYTES // 2 + 1),
    ],
    ids=range(17),
)
def test_hostile_grammars(
    vocabulary: GrammarVocabulary, executor: ThreadPoolExecutor, grammar: str
) -> None:
    def use() -> None:
        matcher = vocabulary.compile(grammar).deep_copy()
        for _ in range(3):
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            (allowed, *_) = [*np.flatnonzero(np.unpackbits(bits, bitorder="little")), -1]
            if allowed < 0 or allowed == vocabulary.end_id or not matcher.consume_token(allowed):
                return

    error = executor.submit(use).exception(timeout=20)
    assert error is None or isinstance(error, GrammarFailed)
    assert error is None or 0 < len(str(error)) <= 300
