"""Every supported architecture gives transformers' float32 greedy tokens, chunked and batched."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.backends.cpu.backend import CpuBackend
from engine.batch import BatchInputs
from engine.engine import Engine
from engine.sequence import Sequence
from mesh.config import WorkerConfig
from mesh.errors import ConfigError
from mesh.messages import SamplingParams
from tests.unit.engine.families import FAMILIES, SHAPE, random_model


def _engine(folder: Path, **config: Any) -> Engine:
    defaults: dict[str, Any] = {
        "kv_blocks": 64, "max_batched_tokens": 48, "max_step_ms": 0.0, "weights": "fp32",
    }  # fmt: skip
    worker = WorkerConfig(
        role="decode",
        worker_id="test",
        redis_url="redis://127.0.0.1:1/0",
        model=str(folder),
        **{**defaults, **config},
    )
    return Engine(worker, CpuBackend(worker.weights, 2))


def _generate(engine: Engine, prompts: list[list[int]], count: int) -> list[list[int]]:
    now_s = time.monotonic()
    sequences = [
        Sequence(
            request_id=str(index),
            transfer_id=str(index),
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(max_tokens=count, temperature=0.0),
            deadline_s=now_s + 1e6,
            arrival_s=now_s + index,
        )
        for index, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    live = set(sequences)
    while live:
        engine.step()
        for sequence in [s for s in live if s.finish_reason is not None]:
            engine.scheduler.finish(sequence)
            live.remove(sequence)
    engine.scheduler.pool.check_integrity()
    return [sequence.token_ids[len(p) :] for sequence, p in zip(sequences, prompts, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(family: str, tmp_path: Path) -> None:
    model = random_model(family, tmp_path)
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(3, 320, (length,), generator=generator).tolist()
        for length in (1, 15, 16, 17, 40, 90)
    ]
    engine = _engine(tmp_path)
    outputs = _generate(engine, prompts, 12)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        for position, token in enumerate(output):
            margin = float(best[position, 0] - best[position, 1])
            assert token == int(logits[position].argmax()) or margin < 1e-3, (position, margin)


def _last_logits(engine: Engine, prompt: list[int]) -> torch.Tensor:
    captured: list[torch.Tensor] = []
    forward = engine.model.forward

    def capture(batch: BatchInputs, on_kv_written: object) -> torch.Tensor:
        captured.append(forward(batch))
        return captured[-1]

    engine.model.forward = capture  # type: ignore[method-assign]
    _generate(engine, [prompt], 1)
    return captured[-1]


@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 0.05), ("fp16", 0.01), ("int8", 0.05)])
def test_kv_dtypes_stay_close_to_fp32(dtype: str, bound: float, tmp_path: Path) -> None:
    torch.manual_seed(7)
    config = transformers.LlamaConfig(**{**SHAPE, "initializer_range": 0.08})
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        tmp_path
    )
    prompt = torch.randint(3, 320, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = {
        kind: _last_logits(_engine(tmp_path, kv_dtype=kind), prompt) for kind in ("fp32", dtype)
    }
    error = (logits[dtype] - logits["fp32"]).abs().max() / logits["fp32"].abs().max()
    assert 0 < error < bound


def test_final_logits_are_capped(tmp_path: Path) -> None:
    torch.manual_seed(7)
    config = transformers.Gemma3TextConfig(**SHAPE, final_logit_softcapping=5.0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    prompt = torch.randint(3, 320, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1]
    assert 4.0 < expected.abs().max() <= 5.0
    logits = _last_logits(_engine(tmp_path), prompt)[0]
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


def test_an_attention_softcap_is_refused_by_name(tmp_path: Path) -> None:
    config = transformers.Gemma3TextConfig(**SHAPE, attn_logit_softcapping=5.0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="attention logit softcap is not supported on a cpu"):
        _engine(tmp_path)
