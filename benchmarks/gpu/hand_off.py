"""One prefill and one decode worker on the same card, through the whole HTTP stack."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file

from benchmarks.servers import Server, pdmesh_cluster, served_model
from engine.weights.expected_tensors import expected_tensors
from engine.weights.hf_config import config_from_hf

HEADINGS = (
    "transport", "prompt", "first token ms", "again ms", "ms / token", "KV MB", "KV MB/s",
    "same answer", "",
)  # fmt: skip
NUM_OUTPUT = 32
_BLOCK_SIZE = 16
_TIMEOUT_S = 60.0
_NUM_WORDS = 2 + 256
_KV_BYTES = "pdmesh:kv_transfer_bytes_total"
_KV_SECONDS = (
    "pdmesh:kv_transfer_hidden_seconds_sum",
    "pdmesh:kv_transfer_exposed_seconds_sum",
)

MODEL: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000,
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 16384,
    "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
"""Half a billion parameters."""


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """A random model in bfloat16, with a tokenizer of bytes."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, shape in expected_tensors(config_from_hf(config)):
        values = torch.randn(shape, generator=generator)
        scaled = values * 0.02 + 1.0 if len(shape) == 1 else values * 1.5 * shape[-1] ** -0.5
        tensors[name] = scaled.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *alphabet]
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[])
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(words[:2])
    inner.save(str(folder / "tokenizer.json"))


def measure(
    model: Path, log_dir: Path, prompt_lengths: Sequence[int], flags: Sequence[str]
) -> list[list[object]]:
    """Rows of the table, one per length; the cluster is started and ended.

    Raises:
        Unavailable: the cluster did not come up; the text holds the end of its log.
    """
    chosen = [flag.partition("=")[2] for flag in flags if flag.startswith("--transport=")]
    transport = chosen[0] if chosen else "auto"
    longest = max(prompt_lengths) + NUM_OUTPUT
    up_flags = [
        f"--model={model}", "--prefill=1", "--decode=1", f"--max-model-len={longest}",
        f"--block-size={_BLOCK_SIZE}", *flags,
    ]  # fmt: skip
    rows: list[list[object]] = []
    with pdmesh_cluster(log_dir, up_flags) as server:
        _ask(server, _prompt(8, seed=0))  # the first hand-off opens connections
        for length in prompt_lengths:
            before = _transferred(server)
            prompt = _prompt(length, seed=length)
            first_s, total_s, answer = _ask(server, prompt)
            after = _transferred(server)
            again_s, _, again = _ask(server, prompt)
            moved, seconds = (b - a for a, b in zip(before, after, strict=True))
            rate = moved / seconds / 1e6 if seconds > 0 else float("nan")
            same = sum(a == b for a, b in zip(answer, again, strict=True))
            rows.append([
                transport, length, first_s * 1e3, again_s * 1e3,
                (total_s - first_s) / (NUM_OUTPUT - 1) * 1e3, moved / 1e6, rate,
                f"{same}/{NUM_OUTPUT}",
                "ok" if same == NUM_OUTPUT else "DIFFERS",
            ])  # fmt: skip
    return rows


def _prompt(length: int, *, seed: int) -> list[int]:
    """Tokens that the tokenizer knows; the model has more."""
    generator = np.random.default_rng(seed)
    return [int(token) for token in generator.integers(2, _NUM_WORDS, length)]


def _ask(server: Server, prompt: list[int]) -> tuple[float, float, list[int]]:
    """Seconds to the first token, seconds in all, and the tokens."""
    body = {
        "model": served_model(server.url), "prompt": prompt, "max_tokens": NUM_OUTPUT,
        "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(),
        {"content-type": "application/json"},
    )  # fmt: skip
    start_s = time.monotonic()
    first_s = 0.0
    tokens: list[int] = []
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event.get("choices", ()):
                found = choice.get("token_ids") or []
                if found and not tokens:
                    first_s = time.monotonic() - start_s
                tokens += found
    if len(tokens) != NUM_OUTPUT:
        raise RuntimeError(f"{len(tokens)} tokens came instead of {NUM_OUTPUT}")
    return first_s, time.monotonic() - start_s, tokens


def _transferred(server: Server) -> tuple[float, float]:
    """Bytes of KV that the workers have written so far, and seconds in which they moved."""
    num_bytes = seconds = 0.0
    for worker in _workers(server):
        url = f"{worker['http_endpoint']}/metrics"
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            text = answer.read().decode()
        num_bytes += _sum(text, _KV_BYTES)
        seconds += sum(_sum(text, name) for name in _KV_SECONDS)
    return num_bytes, seconds


def _sum(text: str, name: str) -> float:
    """Over all labels of a metric in the text format."""
    pattern = rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$"
    return sum(map(float, re.findall(pattern, text, re.M)))


def _workers(server: Server) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{server.url}/debug/census", timeout=_TIMEOUT_S) as answer:
        found: list[dict[str, Any]] = json.load(answer)["workers"]
    return found
