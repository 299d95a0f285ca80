"""A small random Llama on disk, engines that run it, and transformers' answers to compare with."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from engine.backends.cpu.backend import CpuBackend
from engine.engine import Engine
from engine.sequence import Sequence
from mesh.config import WorkerConfig
from mesh.messages import SamplingParams
from tests.unit.engine.late_runner import LateBackend

VOCAB_SIZE = 96
MAX_LEN = 256
_SEED = 7
_NUMBERS = itertools.count()


class TinyLlama:
    """Owns the folder's files. Weights are large enough for distinct choices of every token."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = transformers.LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=MAX_LEN,
            tie_word_embeddings=False,
        )
        self._model: Any = transformers.LlamaForCausalLM(config).eval()
        generator = torch.Generator().manual_seed(_SEED)
        with torch.no_grad():
            for weight in self._model.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
        self._model.save_pretrained(folder)
        self._answers: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def engine(self, *, overlap: bool = False, **fields: Any) -> Engine:
        """A fresh engine unless told otherwise: float32, 64 blocks of 16 slots, steps of any time.

        With ``overlap`` each step is planned ahead of a device that computes as late as it may.
        """
        defaults: dict[str, Any] = {
            "role": "decode",
            "worker_id": "w",
            "redis_url": "redis://localhost",
            "model": str(self.folder),
            "weights": "fp32",
            "kv_blocks": 64,
            "max_step_ms": 0.0,
        }
        config = WorkerConfig(**{**defaults, **fields})
        config.validate()
        backend = (LateBackend if overlap else CpuBackend)(config.weights, num_threads=2)
        return Engine(config, backend, overlap=overlap)

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Transformers' greedy continuation, recomputed from scratch for every token."""
        key = (tuple(prompt), num_tokens)
        if key not in self._answers:
            tokens = list(prompt)
            with torch.inference_mode():
                for _ in range(num_tokens):
                    logits = self._model(torch.tensor([tokens])).logits[0, -1]
                    tokens.append(int(logits.argmax()))
            self._answers[key] = tokens[len(prompt) :]
        return self._answers[key]

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[T, V] of transformers."""
        with torch.inference_mode():
            return self._model(torch.tensor([tokens])).logits[0]


def random_prompt(length: int, seed: int) -> list[int]:
    """The same tokens for the same arguments; unrelated ones for another seed."""
    return np.random.default_rng([seed, length]).integers(0, VOCAB_SIZE, length).tolist()


def new_sequence(
    prompt: list[int], max_tokens: int = 8, *, arrival_s: float = 0.0, cache_salt: str = "",
    **sampling: Any,
) -> Sequence:  # fmt: skip
    """A greedy sequence unless ``sampling`` says otherwise."""
    name = f"s{next(_NUMBERS)}"
    return Sequence(
        request_id=name,
        transfer_id=name,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling}),
        deadline_s=float("inf"),
        arrival_s=arrival_s,
        cache_salt=cache_salt,
    )


def finish_ended(engine: Engine, max_steps: int = 2000) -> None:
    """Step until every sequence has ended, freeing each as a worker's loop does."""
    for _ in range(max_steps):
        if not engine.scheduler.has_work:
            return
        for result in engine.step().results:
            if result.sequence.finish_reason is not None:
                engine.scheduler.finish(result.sequence)
        engine.scheduler.pool.check_integrity()
    raise AssertionError("sequences did not end")


def generate(engine: Engine, *sequences: Sequence) -> list[list[int]]:
    """Output tokens of sequences that all arrive at once."""
    for sequence in sequences:
        engine.scheduler.add(sequence)
    finish_ended(engine)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]
