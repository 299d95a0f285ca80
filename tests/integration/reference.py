"""Transformers' float32 model on the same file: what greedy decoding should give.

Outputs are judged by teacher forcing: one forward over prompt and output gives the reference's
logits at every output position, each with exactly our tokens before it. As long as all tokens are
its argmax, that is the comparison with ``generate`` step by step; after a permitted difference it
goes on judging, where comparing two texts could not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MARGIN = 1e-3
"""Where the reference's two best logits are closer than this, either token is right."""


class Reference:
    """Owns the reference model; remembers what it judged, since outputs repeat."""

    def __init__(self, folder: Path, **options: Any) -> None:
        """Load; ``options`` go to transformers (``gguf_file``)."""
        torch.set_num_threads(2)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
        self.model.eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        self._judged: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}

    def encode(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        """Token ids of a text, or of messages through the chat template."""
        if isinstance(prompt, str):
            ids: list[int] = self.tokenizer.encode(prompt)
            return ids
        ids = self.tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=False
        )
        return ids

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], num_last: int) -> torch.Tensor:
        """Logits after each of the last ``num_last`` tokens, [num_last, V]."""
        output = self.model(torch.tensor([list(ids)]), logits_to_keep=num_last)
        logits: torch.Tensor = output.logits[0]
        return logits

    def mismatches(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[str]:
        """Positions at which another token is greedy by more than ``MARGIN``."""
        key = (tuple(prompt_ids), tuple(output_ids))
        if key not in self._judged:
            self._judged[key] = self._judge(*key)
        return self._judged[key]

    def margins(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[float]:
        """Distance of the two best logits at every position of the output."""
        logits = self.logits([*prompt_ids, *output_ids[:-1]], len(output_ids))
        best = logits.topk(2).values
        return [float(margin) for margin in best[:, 0] - best[:, 1]]

    @torch.inference_mode()
    def generate(self, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Greedy output by transformers' own ``generate``."""
        ids = torch.tensor([list(prompt_ids)])
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
        )
        return [int(token) for token in output[0, len(prompt_ids) :]]

    def _judge(self, prompt_ids: tuple[int, ...], output_ids: tuple[int, ...]) -> list[str]:
        logits = self.logits([*prompt_ids, *output_ids[:-1]], len(output_ids))
        best = logits.argmax(-1)
        wrong = []
        for position, token in enumerate(output_ids):
            behind = float(logits[position, best[position]] - logits[position, token])
            if behind >= MARGIN:
                wrong.append(f"[{position}] {token} is {behind:.4f} behind {int(best[position])}")
        return wrong
