"""The requests of a benchmark: random prompts that share no prefix, lengths of real traffic."""

from __future__ import annotations

import csv
import random
from pathlib import Path

_FIRST_TOKEN = 1000
"""Below it are special tokens and single bytes in the usual vocabularies."""

_TRACE = Path(__file__).parent / "data" / "azure_conv_2023.csv"


def random_prompts(
    count: int, num_tokens: int, *, seed: object, end_token: int = 30_000
) -> list[list[int]]:
    """``count`` prompts of token ids, each its own: no prefix cache can help.

    Args:
        count: How many.
        num_tokens: Length of each.
        seed: Equal seeds give equal prompts.
        end_token: Ids are below it; at most the model's vocabulary.
    """
    source = random.Random(repr(seed))
    return [
        [source.randrange(_FIRST_TOKEN, end_token) for _ in range(num_tokens)] for _ in range(count)
    ]


def chat_output_lengths(count: int, scale: float) -> list[int]:
    """Output lengths of ``count`` requests of a chat service, in order, times ``scale``.

    Scaling keeps the shape of the distribution, which capping would not.
    """
    with _TRACE.open(newline="") as lines:
        rows = csv.DictReader(line for line in lines if not line.startswith("#"))
        lengths = [int(row["GeneratedTokens"]) for row in rows]
    if not 0 < count <= len(lengths):
        raise ValueError(f"the trace holds {len(lengths)} requests, not {count}")
    return [max(1, round(length * scale)) for length in lengths[:count]]
