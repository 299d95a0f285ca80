"""Hugging Face folders: what transformers saved is what the engine gets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.weights.expected_tensors import expected_tensors
from engine.weights.open import open_model
from engine.weights.safetensors_source import SafetensorsSource
from mesh.errors import ConfigError
from mesh.model_text.model_files import ModelFiles
from tests.unit.engine.weights.conftest import ARCHITECTURES
from tests.unit.engine.weights.hf_tensors import hf_tensors

SavedModel = Callable[..., tuple[Any, Path]]


def _files(folder: Path) -> ModelFiles:
    return ModelFiles(kind="hf", path=folder, name="tiny")


def _assert_same(folder: Path, model: Any) -> None:
    wanted = hf_tensors(model)
    config, source = open_model(_files(folder))
    with source:
        assert source.names() == sorted(wanted)
        assert {name for name, _ in expected_tensors(config)} == set(wanted)
        for name, tensor in wanted.items():
            ours = source.get(name)
            assert ours.dtype == torch.float32
            assert ours.is_contiguous()
            assert torch.equal(ours, tensor.to(torch.float32)), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(architecture: str, saved_model: SavedModel) -> None:
    model, folder = saved_model(architecture)
    _assert_same(folder, model)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"head_dim": 24}),
        ("qwen3", {"attention_bias": True}),
        ("qwen2", {"tie_word_embeddings": True}),
    ],
)
def test_variants(architecture: str, fields: dict[str, Any], saved_model: SavedModel) -> None:
    model, folder = saved_model(architecture, **fields)
    _assert_same(folder, model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_model("qwen3").to(dtype)
    model.save_pretrained(tmp_path)
    _assert_same(tmp_path, model)


def test_shards(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    _assert_same(tmp_path, model)


def test_tensors_outlive_the_source(saved_model: SavedModel) -> None:
    model, folder = saved_model("llama")
    config, source = open_model(_files(folder))
    name = "model.embed_tokens.weight"
    with source:
        first, second = source.get(name), source.get(name)
    first.zero_()
    assert torch.equal(second, model.state_dict()[name])
    assert source.shape(name) == (config.vocab_size, config.hidden_size)
    with pytest.raises(ConfigError, match="closed"):
        source.get(name)
    source.close()


def test_content_hash(saved_model: SavedModel, tmp_path: Path) -> None:
    _, folder = saved_model("llama")
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)

    def digest() -> str:
        with SafetensorsSource(copy) as source:
            return source.content_hash()

    with SafetensorsSource(folder) as source:
        assert digest() == source.content_hash()
    before = digest()
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.5
    save_file(tensors, copy / "model.safetensors")
    assert digest() != before


class TestRefused:
    """Every way a folder can be wrong is a ConfigError that says what is wrong."""

    @pytest.fixture
    def folder(self, saved_model: SavedModel) -> Path:
        return saved_model("llama")[1]

    def _change(self, folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    def _refused(self, folder: Path, match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            open_model(_files(folder))

    def test_missing_tensor(self, folder: Path) -> None:
        self._change(folder, lambda t: t.pop("model.layers.2.self_attn.v_proj.weight"))
        self._refused(folder, r"layers\.2\.self_attn\.v_proj\.weight is missing")

    def test_wrong_shape(self, folder: Path) -> None:
        self._change(folder, lambda t: t.update({"model.norm.weight": torch.ones(63)}))
        self._refused(folder, r"model\.norm\.weight has shape \[63\]")

    def test_tensor_without_a_place(self, folder: Path) -> None:
        self._change(folder, lambda t: t.update({"model.layers.0.mlp.up_proj.bias": torch.ones(4)}))
        self._refused(folder, r"up_proj\.bias has no place")

    def test_unsupported_type(self, folder: Path) -> None:
        ints = torch.ones(64, dtype=torch.int8)
        self._change(folder, lambda t: t.update({"model.norm.weight": ints}))
        self._refused(folder, r"model\.norm\.weight: I8")

    def test_leftovers_are_fine(self, folder: Path) -> None:
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        self._change(folder, lambda t: t.update({name: torch.ones(8)}))
        open_model(_files(folder))[1].close()

    @pytest.mark.parametrize("keep", [0, 4, 8, 100, 5000])
    def test_truncated(self, folder: Path, keep: int) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        self._refused(folder, "model.safetensors")

    def test_no_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        self._refused(folder, "must hold model.safetensors")

    def test_bad_json(self, folder: Path) -> None:
        for content in (b"", b"[]", b'{"a": ', b"\xff\xfe", b"[" * 100_000, b" " * (5 << 20)):
            (folder / "config.json").write_bytes(content)
            self._refused(folder, "config.json")

    @pytest.mark.parametrize(
        "name",
        [
            "../model.safetensors",
            "/etc/passwd",
            "sub/model.safetensors",
            "..",
            "",
            "model.bin",
            "a\0.safetensors",
            "absent.safetensors",
        ],
    )
    def test_index_stays_inside(self, folder: Path, name: str) -> None:
        shutil.copy(folder / "model.safetensors", folder.parent / "model.safetensors")
        index = {"weight_map": {"model.norm.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        self._refused(folder, "bad file name|absent.safetensors cannot be read")

    @pytest.mark.parametrize(
        "content", ["", "[]", '{"weight_map": {"a": 1}}', '{"weight_map": {}}']
    )
    def test_bad_index(self, folder: Path, content: str) -> None:
        (folder / "model.safetensors.index.json").write_text(content)
        self._refused(folder, "index.json")

    def test_index_promises_too_much(self, folder: Path) -> None:
        index = {"weight_map": {"model.absent.weight": "model.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        self._refused(folder, r"promises tensor 'model\.absent\.weight'")
