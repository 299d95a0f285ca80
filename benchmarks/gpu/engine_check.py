"""The whole engine on the card: in graphs and ahead of the device, and step by step.

In float32 both must give the same tokens, and every greedy token must be the best one, or as good
as it, of a plain float64 decoder. What runs on the card alone is checked here: graphs, events,
pinned copies.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.hand_off import MODEL, write_model
from engine.backends.gpu.backend import GpuBackend
from engine.backends.gpu.device import CudaDevice, Device
from engine.backends.gpu.linears import WeightScheme
from engine.backends.gpu.step_runner import GpuRunner
from engine.engine import Engine
from engine.model_config import ModelConfig, inv_freq
from engine.sequence import Sequence
from engine.warm_up import warm_up
from engine.weights.open import open_model
from engine.weights.source import WeightSource
from mesh.config import WorkerConfig
from mesh.messages import SamplingParams
from mesh.model_text.model_files import resolve_model

HEADINGS = ("weights", "sequences", "steps in graphs", "equal answers", "largest loss", "bound", "")
SMALL: dict[str, Any] = {
    **MODEL, "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 1024,
}  # fmt: skip
_BOUNDS: dict[WeightScheme, float] = {"fp32": 1e-3, "bf16": 0.15}
"""Logit by which a chosen token may be below the best one; logits have a spread of 1.5."""


def measure(
    folder: Path,
    *,
    lengths: SequenceOf[int] = (1, 17, 100, 300, 33),
    num_output: int = 24,
    make_device: Callable[[], Device] = CudaDevice,
) -> list[list[object]]:
    """Rows of the table; writes a model into ``folder``."""
    write_model(folder, SMALL)
    prompts = _prompts(lengths)
    rows: list[list[object]] = []
    for weights, bound in _BOUNDS.items():
        fast = _engine(folder, weights, make_device(), overlap=True)
        warm_up(fast)
        answers = _answers(fast, prompts, num_output)
        slow = _engine(folder, weights, make_device(), overlap=False)
        equal = sum(
            a == b for a, b in zip(answers, _answers(slow, prompts, num_output), strict=True)
        )
        loss = max(
            loss_of(folder, prompt, answer)
            for prompt, answer in zip(prompts, answers[: len(prompts)], strict=True)
        )
        assert isinstance(fast.runner, GpuRunner)
        num_replayed = fast.runner.num_replayed
        # In 16 bits, a product's rounding depends on the batch, and a near tie may go either way.
        is_equal = equal == len(answers) or weights != "fp32"
        is_good = is_equal and loss <= bound and num_replayed > 0
        rows.append([
            weights, len(answers), num_replayed, f"{equal}/{len(answers)}", f"{loss:.1e}",
            f"{bound:.0e}", "ok" if is_good else "WRONG",
        ])  # fmt: skip
        fast.scheduler.pool.check_integrity()
    return rows


def _prompts(lengths: SequenceOf[int]) -> list[list[int]]:
    generator = np.random.default_rng(3)
    return [generator.integers(2, SMALL["vocab_size"], length).tolist() for length in lengths]


def _engine(folder: Path, weights: WeightScheme, device: Device, *, overlap: bool) -> Engine:
    config = WorkerConfig(
        role="decode", worker_id="check", redis_url="redis://127.0.0.1:1", model=str(folder),
        weights=weights, kv_blocks=256, max_num_seqs=12, max_batched_tokens=128,
        max_model_len=SMALL["max_position_embeddings"], max_step_ms=0.0,
    )  # fmt: skip
    return Engine(config, GpuBackend(weights, device), overlap=overlap)


def _answers(engine: Engine, prompts: list[list[int]], num_output: int) -> list[list[int]]:
    """Greedy ones of all prompts, then seeded ones of all prompts, computed together."""
    sequences = []
    for index, prompt in enumerate([*prompts, *prompts]):
        is_random = index >= len(prompts)
        sampling = SamplingParams(
            max_tokens=num_output, temperature=float(is_random), top_p=0.9 if is_random else 1.0,
            seed=index,
        )  # fmt: skip
        sequences.append(
            Sequence(
                request_id=str(index),
                transfer_id=str(index),
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                sampling=sampling,
                deadline_s=float("inf"),
                arrival_s=float(index),
                cache_salt=str(index),
            )
        )
        engine.scheduler.add(sequences[-1])
    while engine.scheduler.has_work:
        for result in engine.step().results:
            if result.sequence.finish_reason is not None:
                engine.scheduler.finish(result.sequence)
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]


def loss_of(folder: Path, prompt: list[int], answer: list[int]) -> float:
    """By how much any token's logit is below the best one's, in float64."""
    config, source = open_model(resolve_model(str(folder)))
    with source:
        logits = reference(config, source, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return float((logits.max(dim=1).values - chosen).max())


def reference(config: ModelConfig, source: WeightSource, tokens: list[int]) -> torch.Tensor:
    """[T, V] of a Llama without anything special, computed at once."""

    def weight(name: str) -> torch.Tensor:
        return source.get(f"{name}.weight").double()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps)
        return x * scale * weight(name)

    frequencies, _ = inv_freq(config)
    angles = torch.outer(torch.arange(len(tokens)).double(), frequencies.double())
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    hidden = weight("model.embed_tokens")[tokens]
    group = config.num_heads // config.num_kv_heads
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        x = norm(hidden, f"{prefix}input_layernorm")
        q, k, v = (
            (x @ weight(f"{prefix}self_attn.{part}_proj").T).view(len(tokens), -1, config.head_dim)
            for part in "qkv"
        )
        q, k = rotate(q), rotate(k).repeat_interleave(group, dim=1)
        attended = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1),
            v.repeat_interleave(group, dim=1).transpose(0, 1),
            is_causal=True, scale=config.query_scale,
        )  # fmt: skip
        hidden = (
            hidden + attended.transpose(0, 1).flatten(1) @ weight(f"{prefix}self_attn.o_proj").T
        )
        x = norm(hidden, f"{prefix}post_attention_layernorm")
        gate = torch.nn.functional.silu(x @ weight(f"{prefix}mlp.gate_proj").T)
        up = x @ weight(f"{prefix}mlp.up_proj").T
        hidden = hidden + (gate * up) @ weight(f"{prefix}mlp.down_proj").T
    return norm(hidden, "model.norm") @ weight("lm_head").T
