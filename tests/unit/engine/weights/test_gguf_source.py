"""GGUF files: the packaged model against transformers, the rest against what was written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.model_config import ModelConfig
from engine.weights.expected_tensors import expected_tensors
from engine.weights.gguf_source import GgufSource
from engine.weights.open import open_model
from engine.weights.source import WeightSource
from mesh.errors import ConfigError
from mesh.model_text.model_files import ModelFiles, resolve_model
from tests.unit.engine.weights.conftest import ARCHITECTURES
from tests.unit.engine.weights.gguf_file import write_gguf
from tests.unit.engine.weights.hf_tensors import hf_tensors

MakeModel = Callable[..., Any]


def _open(path: Path) -> tuple[ModelConfig, WeightSource]:
    return open_model(ModelFiles(kind="gguf", path=path, name="tiny"))


def test_packaged_model_equals_transformers() -> None:
    files = resolve_model("")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        files.path.parent, gguf_file=files.path.name, dtype=torch.float32
    )
    config, source = open_model(files)
    theirs = reference.config
    assert config.num_layers == theirs.num_hidden_layers == 30
    assert config.num_kv_heads == theirs.num_key_value_heads == 3
    assert config.rope.theta == theirs.rope_parameters["rope_theta"] == 100000
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.tie_word_embeddings
    wanted = hf_tensors(reference)
    with source:
        assert source.names() == sorted(wanted)
        for name, tensor in wanted.items():
            assert torch.equal(source.get(name), tensor), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_round_trip(architecture: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    model = tiny_model(architecture, num_hidden_layers=7)
    model.save_pretrained(tmp_path / "hf")
    write_gguf(tmp_path / "m.gguf", model)
    config, source = _open(tmp_path / "m.gguf")
    from_hf, hf_source = open_model(ModelFiles(kind="hf", path=tmp_path / "hf", name="tiny"))
    hf_source.close()
    # what the format does not carry or rounds
    changed: dict[str, Any] = {"rms_norm_eps": pytest.approx(from_hf.rms_norm_eps, rel=1e-6)}
    if architecture == "mistral":
        changed |= {"architecture": "llama", "sliding_window": None}
        changed["layer_types"] = ("full_attention",) * 7
    if architecture == "gemma3_text":
        changed["query_scale"] = 32**-0.5  # of head_dim
    if architecture == "qwen3_moe":
        changed["norm_topk_prob"] = True
    for field in ModelConfig.__struct_fields__:
        assert getattr(config, field) == changed.get(field, getattr(from_hf, field)), field
    wanted = hf_tensors(model)
    with source:
        assert source.names() == sorted(wanted)
        for name, tensor in wanted.items():
            ours = source.get(name)
            assert ours.is_contiguous()
            if architecture == "gemma3_text" and name.endswith("norm.weight"):
                torch.testing.assert_close(ours, tensor, rtol=0, atol=2e-7)  # 1 + w was rounded
            else:
                assert torch.equal(ours, tensor), name


@pytest.mark.parametrize("storage", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_storage_types(storage: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    model = tiny_model("llama")
    write_gguf(tmp_path / "m.gguf", model, storage=storage)
    tolerance = {"F16": 1e-3, "BF16": 4e-3, "Q8_0": 5e-3, "Q4_0": 0.06, "Q5_1": 0.03}[storage]
    config, source = _open(tmp_path / "m.gguf")
    with source:
        assert not config.tie_word_embeddings
        for name, tensor in hf_tensors(model).items():
            error = (source.get(name) - tensor).abs().max()
            assert error < tolerance, name


def test_llama_biases(tiny_model: MakeModel, tmp_path: Path) -> None:
    model = tiny_model("llama", attention_bias=True)
    write_gguf(tmp_path / "m.gguf", model)
    config, source = _open(tmp_path / "m.gguf")
    with source:
        assert config.attention_bias
        assert config.attention_out_bias
        for name, tensor in hf_tensors(model).items():
            assert torch.equal(source.get(name), tensor), name


def test_rope_factors(tiny_model: MakeModel, tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    write_gguf(tmp_path / "m.gguf", tiny_model("llama"), extra={"rope_freqs.weight": factors})
    config, source = _open(tmp_path / "m.gguf")
    source.close()
    assert config.rope.scaling == "factors"
    assert config.rope.freq_factors == tuple(factors.tolist())
    write_gguf(tmp_path / "bad.gguf", tiny_model("llama"), extra={"rope_freqs.weight": factors[:7]})
    with pytest.raises(ConfigError, match="rope_freqs"):
        _open(tmp_path / "bad.gguf")


def test_yarn(tiny_model: MakeModel, tmp_path: Path) -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 64, "rope_type": "yarn"}
    model = tiny_model("qwen2", rope_parameters={**scaling, "rope_theta": 1e4})
    model.save_pretrained(tmp_path / "hf")
    fields = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    write_gguf(tmp_path / "m.gguf", model, fields=fields)
    config, source = _open(tmp_path / "m.gguf")
    source.close()
    from_hf, source = open_model(ModelFiles(kind="hf", path=tmp_path / "hf", name="tiny"))
    source.close()
    assert config.rope == from_hf.rope


def test_linear_scaling_of_gemma(tiny_model: MakeModel, tmp_path: Path) -> None:
    fields = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    write_gguf(tmp_path / "m.gguf", tiny_model("gemma3_text"), fields=fields)
    config, source = _open(tmp_path / "m.gguf")
    source.close()
    assert (config.rope.scaling, config.rope.factor, config.rope.local_theta) == ("linear", 8, 1e4)


@pytest.mark.parametrize(
    ("architecture", "fields", "match"),
    [
        ("llama", {"attention.key_length": 32}, "rope.dimension_count"),
        ("llama", {"logit_scale": 0.5}, "logit_scale"),
        ("llama", {"expert_count": 8}, "expert_count"),
        ("llama", {"attention.scale": 0.5}, "attention.scale"),
        ("llama", {"rope.scaling.type": "longrope"}, "rope.scaling.type"),
        ("llama", {"rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ("llama", {"attention.causal": False}, "attention.causal"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("qwen2", {"vocab_size": 97}, r"embed_tokens\.weight has shape"),
        ("qwen2", {"attention.value_length": 8}, "value_length"),
        ("gemma3_text", {"attention.sliding_window_pattern": [True]}, "sliding_window_pattern"),
    ],
)
def test_refused_by_name(
    architecture: str, fields: dict[str, Any], match: str, tiny_model: MakeModel, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model(architecture), fields=fields)
    with pytest.raises(ConfigError, match=match):
        _open(tmp_path / "m.gguf")


def test_tensor_without_a_place(tiny_model: MakeModel, tmp_path: Path) -> None:
    ones = np.ones(64, dtype=np.float32)
    write_gguf(tmp_path / "m.gguf", tiny_model("qwen2"), extra={"blk.0.attn_q_norm.weight": ones})
    with pytest.raises(ConfigError, match="q_norm"):
        _open(tmp_path / "m.gguf")
    write_gguf(tmp_path / "m.gguf", tiny_model("qwen2"), extra={"blk.0.ffn_up_exps.weight": ones})
    with pytest.raises(ConfigError, match="ffn_up_exps"):
        _open(tmp_path / "m.gguf")


def test_cut_short_while_open(tiny_model: MakeModel, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_model("llama"))
    _, source = _open(path)
    with source:
        os.truncate(path, 20_000)
        with pytest.raises(ConfigError, match="cut short"):
            source.get("lm_head.weight")
    with pytest.raises(ConfigError, match="closed"):
        source.get("lm_head.weight")
    source.close()


def test_content_hash(tiny_model: MakeModel, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_model("llama"))

    def digest(file: Path) -> str:
        with GgufSource(file) as source:
            return source.content_hash()

    copy = shutil.copy(path, tmp_path / "copy.gguf")
    assert digest(path) == digest(copy)
    with copy.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    assert digest(path) != digest(copy)


def test_every_listed_tensor_is_there(tiny_model: MakeModel, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_model("qwen3_moe"))
    config, source = _open(path)
    with source:
        assert sorted(name for name, _ in expected_tensors(config)) == source.names()
        for name, shape in expected_tensors(config):
            assert tuple(source.get(name).shape) == source.shape(name) == shape
