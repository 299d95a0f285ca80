"""Substrings of real answers as stop strings: streamed and whole are the same, nothing leaks.

``greedy_outputs.json`` holds 100 greedy answers of the packaged model in float32, as token ids:
prose, lists, code, emoji and several scripts. Beside them, 20 streams of random tokens, which cut
characters anywhere. A request sends every output that contains the stop string, so one request
checks many pairs of output and stop.
"""

from __future__ import annotations

import collections
import json
import random
from pathlib import Path

import pytest

from gateway.prompts.served_model import ServedModel
from tests.unit.gateway.client import COMPLETIONS, Client
from tests.unit.gateway.scripted_cluster import Script, ScriptedCluster

GREEDY: list[list[int]] = json.loads(
    (Path(__file__).parent / "greedy_outputs.json").read_text(encoding="utf-8")
)
NUM_RANDOM = 20
END = 2


def outputs_of(model: ServedModel) -> list[list[int]]:
    chooser = random.Random(5)
    words = chooser.choices(range(1000), k=NUM_RANDOM * 12)
    cuts = model.tokenizer.encode("日本😀é", add_special_tokens=False)
    noise = [
        [chooser.choice([word, *cuts]) for word in words[start : start + 12]]
        for start in range(0, len(words), 12)
    ]
    return [[token for token in ids if token != END] for ids in (*GREEDY, *noise)]


def up_to(text: str, stop: str) -> str:
    """The text until the stop string completes for the first time, without it."""
    for end in range(len(stop), len(text) + 1):
        if text[:end].endswith(stop):
            return text[: end - len(stop)]
    raise AssertionError("the stop string is not in the text")


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7])
async def test_substrings_as_stop(
    client: Client, cluster: ScriptedCluster, model: ServedModel, size: int
) -> None:
    outputs = outputs_of(model)
    texts = [model.tokenizer.decode(ids) for ids in outputs]
    answers = {index + 10: [*ids, END] for index, ids in enumerate(outputs)}
    await cluster.pair(Script(answers=answers, burst=100))
    await cluster.show_all()
    chooser = random.Random(size)
    num_pairs = 0
    while num_pairs < 600:
        text = chooser.choice(texts)
        start = chooser.randrange(len(text) - size)
        stop = text[start : start + size]
        holders = [index for index, one in enumerate(texts) if stop in one]
        fields = {
            "prompt": [[index + 10] for index in holders],
            "stop": stop,
            "max_tokens": 100,
        }
        expected = [up_to(texts[index], stop) for index in holders]
        whole = await client.complete(**fields)
        assert [choice["text"] for choice in whole["choices"]] == expected
        assert {choice["finish_reason"] for choice in whole["choices"]} == {"stop"}
        streamed: collections.Counter[int] = collections.Counter()
        shown = [""] * len(holders)
        for chunk in await client.stream_json(COMPLETIONS, **fields):
            [choice] = chunk["choices"]
            shown[choice["index"]] += choice["text"]
            streamed[choice["index"]] += 1
            assert expected[choice["index"]].startswith(shown[choice["index"]]), "a part leaked"
        assert shown == expected
        assert sum(streamed.values()) == whole["usage"]["completion_tokens"]
        num_pairs += len(holders)
    assert num_pairs >= 600, "3,600 pairs over the six sizes"


def test_the_outputs_are_what_they_should_be(model: ServedModel) -> None:
    assert len(GREEDY) == 100
    assert len({tuple(ids) for ids in GREEDY}) == 100
    texts = [model.tokenizer.decode(ids) for ids in outputs_of(model)]
    assert any("\ufffd" in text for text in texts)
    assert sum(not text.isascii() for text in texts) > NUM_RANDOM
