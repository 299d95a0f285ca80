"""What quantised weights cost: perplexity on a fixed text, and answers to simple questions."""

from __future__ import annotations

import asyncio
import math

import aiohttp
import numpy as np
import pytest
import torch

from engine.backends.cpu.backend import CpuBackend
from engine.batch import BatchInputs
from engine.engine import Engine
from mesh.config import KVDtype, Weights, WorkerConfig
from tests.integration.conftest import on
from tests.integration.prompts import BLOCK_SIZE
from tests.integration.reference import Reference
from tests.integration.running_cluster import Answer, RunningCluster, ask

CLEAR_MARGIN = 1.0
"""In logits. Below it the float32 model itself hardly prefers its token, and int8, which moves
logits by about 0.1 and now and then by 0.5, may take the other one without being any worse."""

_ANSWER_TOKENS = 16
_QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Germany?",
    "What is the capital of Italy?",
    "What is the capital of Japan?",
    "What is the capital of Spain?",
    "What is 2+2?",
    "What is 5 times 3?",
    "What colour is the sky?",
    "How many days are in a week?",
    "How many legs does a spider have?",
    "What is the opposite of hot?",
    "Which planet is closest to the sun?",
    "Who wrote Romeo and Juliet?",
    "What is the largest ocean on Earth?",
    "What do bees make?",
    "Name the first month of the year.",
    "What is water made of?",
    "What is the boiling point of water in Celsius?",
    "Which animal barks?",
    "What language is spoken in Brazil?",
    "How many minutes are in an hour?",
    "What is the chemical symbol for gold?",
    "Who painted the Mona Lisa?",
    "What gas do plants absorb?",
)
"""Chosen before any int8 answer was seen."""


_QUANTISED: tuple[tuple[Weights, KVDtype, float], ...] = (
    ("fp32", "int8", 0.01),
    ("int8", "fp32", 0.01),
    ("int8", "fp16", 0.01),
    ("int8", "bf16", 0.01),
    ("int8", "int8", 0.01),
    ("int4", "fp16", 0.03),
    ("int4", "int8", 0.03),
)
"""Weights, KV storage, and how far perplexity may be from float32's, as a fraction of it."""


def _perplexity(logits: torch.Tensor, ids: list[int]) -> float:
    losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))
    return math.exp(float(losses))


def _engine_perplexity(weights: Weights, kv_dtype: KVDtype, ids: list[int]) -> float:
    """One forward over the whole text, as the workers run it."""
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    config = WorkerConfig(
        role="prefill",
        worker_id="perplexity",
        redis_url="redis://unused",
        weights=weights,
        kv_dtype=kv_dtype,
        kv_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=num_blocks * BLOCK_SIZE,
    )
    engine = Engine(config, CpuBackend(weights, 2))
    rows = np.arange(len(ids))
    batch = BatchInputs(
        token_ids=np.asarray(ids, np.int64),
        token_sources=np.full(len(ids), -1, np.int32),
        positions=rows.astype(np.int32),
        slot_mapping=rows,
        query_starts=np.asarray([0, len(ids)], np.int32),
        context_lens=np.asarray([len(ids)], np.int32),
        block_tables=np.arange(num_blocks, dtype=np.int32)[None],
        sample_rows=rows,
    )
    with torch.inference_mode():
        return _perplexity(engine.model.forward(batch), ids)


def test_perplexity(reference: Reference, text_ids: list[int]) -> None:
    expected = _perplexity(reference.logits(text_ids, len(text_ids)), text_ids)
    fp32 = _engine_perplexity("fp32", "fp32", text_ids)
    print(f"perplexity of {len(text_ids)} tokens: transformers fp32 {expected:.4f}")
    print(f"weights fp32, KV fp32: {fp32:.4f}")
    too_far = []
    for weights, kv_dtype, bound in _QUANTISED:
        found = _engine_perplexity(weights, kv_dtype, text_ids)
        line = f"weights {weights}, KV {kv_dtype}: {found:.4f} ({100 * (found / fp32 - 1):+.2f} %)"
        print(line)
        if found != pytest.approx(fp32, rel=bound):
            too_far.append(line)
    assert fp32 == pytest.approx(expected, rel=1e-4)
    assert too_far == []


@on("int8-1p1d")
async def test_the_same_answers(
    cluster: RunningCluster, session: aiohttp.ClientSession, reference: Reference
) -> None:
    """float32's choices after the same tokens, but where float32 hardly has one."""
    num_tokens = num_clear = num_equal = 0
    wrong = []
    for question in _QUESTIONS:
        messages = [{"role": "user", "content": question}]
        answer = await ask(cluster, session, messages, max_tokens=_ANSWER_TOKENS)
        assert answer.prompt_ids == reference.encode(messages)
        logits = reference.logits([*answer.prompt_ids, *answer.token_ids[:-1]], _length(answer))
        best = logits.topk(2)
        margins = (best.values[:, 0] - best.values[:, 1]).tolist()
        chosen = best.indices[:, 0].tolist()
        for position, (token, choice, margin) in enumerate(
            zip(answer.token_ids, chosen, margins, strict=True)
        ):
            num_tokens += 1
            num_equal += token == choice
            num_clear += margin >= CLEAR_MARGIN
            if token != choice:
                print(f"{question} {answer.text!r}: token {position} has margin {margin:.3f}")
                if margin >= CLEAR_MARGIN:
                    wrong.append((question, position, margin))
    print(f"{num_equal} of {num_tokens} tokens are float32's; {num_clear} are clear")
    assert wrong == []
    assert num_clear >= 200
    assert num_equal >= 0.9 * num_tokens


@on("int8-1p1d")
async def test_an_answer_does_not_depend_on_the_batch(
    cluster: RunningCluster, session: aiohttp.ClientSession, text_ids: list[int]
) -> None:
    """Exactly, however the prompts were cut to fill steps (see docs/adr/0002)."""
    prompts = [text_ids[7 * index : 7 * index + 12 + index] for index in range(16)]
    fields = {"max_tokens": 12, "ignore_eos": True}
    alone = [
        await ask(cluster, session, prompt, cache_salt=f"alone {index}", **fields)
        for index, prompt in enumerate(prompts)
    ]
    together = await asyncio.gather(
        *(
            ask(cluster, session, prompt, cache_salt=f"together {index}", **fields)
            for index, prompt in enumerate(prompts)
        )
    )
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]


def _length(answer: Answer) -> int:
    return len(answer.token_ids)
