"""The ``usage`` object of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.generation.choice import Choice


def usage(choices: Sequence[Choice], samples_per_prompt: int) -> dict[str, Any]:
    """Token counts so far; a prompt counts once for all its samples.

    Args:
        choices: All choices, the samples of a prompt side by side.
        samples_per_prompt: The request's ``n``.
    """
    prompts = choices[::samples_per_prompt]
    num_prompt = sum(len(choice.generation.request.prompt_ids) for choice in prompts)
    num_output = sum(choice.num_tokens for choice in choices)
    num_cached = sum(choice.generation.num_cached_tokens for choice in prompts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
