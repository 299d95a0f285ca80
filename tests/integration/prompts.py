"""Prompts of many kinds for the comparison with the reference."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

BLOCK_SIZE = 16


class Case(NamedTuple):
    """One prompt and how far to follow its answer."""

    name: str
    prompt: str | list[int] | list[dict[str, Any]]
    max_tokens: int = 12
    ignore_eos: bool = False


def _chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


_CHATS: dict[str, list[dict[str, Any]]] = {
    "english": _chat("Explain in one sentence why the sky is blue."),
    "french": _chat("Écris une phrase sur la mer."),
    "german": _chat("Wie heißt die Hauptstadt von Österreich?"),
    "chinese": _chat("请用一句话介绍长城。"),
    "arabic": _chat("ما هي عاصمة مصر؟"),
    "emoji": _chat("What do 🎉🎂👩‍👩‍👧 and 🇯🇵 mean?"),
    "code": _chat("Write a Python function that returns the n-th Fibonacci number."),
    "system": [
        {"role": "system", "content": "You answer like a pirate."},
        {"role": "user", "content": "Where is my ship?"},
    ],
    "turns": [
        {"role": "user", "content": "My name is Ada. Remember it."},
        {"role": "assistant", "content": "I will, Ada."},
        {"role": "user", "content": "What is my name?"},
    ],
}

_TEXTS: dict[str, str] = {
    "english": "It was late in the evening when the train finally",
    "spanish": "Había una vez un pequeño pueblo en",
    "russian": "Москва — столица",
    "japanese": "日本で一番高い山は",
    "hindi": "भारत की राजधानी",
    "emoji": "😀 😃 😄 😁",
    "python": "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot =",
    "json": '{"name": "Ada", "born": 1815, "languages": ["',
    "spaces": "a  b   c\n\n\n\td    e",
    "digits": "1, 1, 2, 3, 5, 8, 13, 21,",
    "one letter": "A",
}

_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 511, 513, 1000, 2000)
"""Around the block size, around the chunk budget of 512, and the longest."""


def cases(text_ids: list[int]) -> list[Case]:
    """All prompts; those of an exact length are cut from ``text_ids``."""
    found = [Case(f"chat {name}", messages) for name, messages in _CHATS.items()]
    found += [Case(f"text {name}", text) for name, text in _TEXTS.items()]
    for length in _LENGTHS:
        ids = list(text_ids)
        while len(ids) < length:
            # Sentences again in another order: nothing to copy from at the same distance.
            pieces = [text_ids[i : i + 40] for i in range(0, len(text_ids), 40)]
            random.Random(len(ids)).shuffle(pieces)
            ids += [token for piece in pieces for token in piece]
        first = random.Random(length).randrange(len(ids) - length + 1)
        found.append(
            Case(f"{length} tokens", ids[first : first + length], max_tokens=8, ignore_eos=True)
        )
    # Two blocks long and an output that crosses into a third and a fourth.
    found.append(
        Case("across blocks", text_ids[: 2 * BLOCK_SIZE - 3], max_tokens=36, ignore_eos=True)
    )
    return found
