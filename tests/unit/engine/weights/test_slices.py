"""A rank's slices: the values of the whole tensor's, and nothing else is read from the file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from engine.tensor_parallel.shard import plan_shard
from engine.tensor_parallel.sharded_source import ShardedSource
from engine.weights.expected_tensors import expected_tensors
from engine.weights.open import open_model
from engine.weights.safetensors_source import SafetensorsSource
from mesh.errors import ConfigError
from mesh.model_text.model_files import resolve_model

_SHAPE = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16,
}  # fmt: skip


def test_the_ranks_slices_make_the_packaged_gguf_model() -> None:
    config, source = open_model(resolve_model(""))
    shards = [ShardedSource(source, plan_shard(config, rank, 3, "int8")) for rank in range(3)]
    names = [
        name
        for name, _ in expected_tensors(config)
        if ".layers." not in name or ".layers.7." in name
    ]
    with source:
        for name in names:
            parts = [shard.get(name) for shard in shards]
            assert [tuple(part.shape) for part in parts] == [shard.shape(name) for shard in shards]
            whole = source.get(name)
            if parts[0].shape == whole.shape:
                assert all(torch.equal(part, whole) for part in parts), name
            else:
                columns = name.endswith(("o_proj.weight", "down_proj.weight"))
                assert torch.equal(torch.cat(parts, dim=1 if columns else 0), whole), name


def test_padding_replication_and_a_bias_that_is_added_once(tmp_path: Path) -> None:
    model = transformers.LlamaConfig(
        **{**_SHAPE, "num_key_value_heads": 2, "num_attention_heads": 4}, attention_bias=True
    )
    transformers.LlamaForCausalLM(model).save_pretrained(tmp_path)
    bias = "model.layers.0.self_attn.o_proj.bias"
    key = "model.layers.0.self_attn.k_proj.weight"
    table = "model.embed_tokens.weight"
    config, source = open_model(resolve_model(str(tmp_path)))
    with source:
        shards = [ShardedSource(source, plan_shard(config, rank, 4)) for rank in range(4)]
        biases = [shard.get(bias) for shard in shards]
        assert torch.equal(sum(biases, torch.zeros(64)), source.get(bias))
        keys = [shard.get(key) for shard in shards]
        assert torch.equal(torch.cat(keys[::2]), source.get(key))
        assert torch.equal(keys[0], keys[1])
        assert torch.equal(keys[2], keys[3])
        tables = torch.cat([shard.get(table) for shard in shards])
        assert torch.equal(tables[:101], source.get(table))
        assert tables.shape[0] == 104
        assert not tables[101:].any()


def test_a_gguf_cut_off_behind_a_ranks_rows_still_gives_them(tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(resolve_model("").path.read_bytes())
    config, source = open_model(resolve_model(str(file)))
    name = "model.layers.3.mlp.up_proj.weight"
    with source:
        first = plan_shard(config, 0, 3).spans(name)[0]
        expected = source.get(name)[first]
        stored = source._stored[name]  # type: ignore[attr-defined]
        os.truncate(file, stored.offset + stored.num_bytes // 3)
        assert torch.equal(source.get(name, first), expected)
        with pytest.raises(ConfigError, match="cut short"):
            source.get(name, plan_shard(config, 1, 3).spans(name)[0])


_READ = """
import sys
from pathlib import Path
from engine.weights.safetensors_source import SafetensorsSource
import os
folder, rows = Path(sys.argv[1]), int(sys.argv[2])
with SafetensorsSource(folder) as source:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2 + 8192)
    print(float(source.get("w", slice(0, rows)).sum()), flush=True)
"""


def test_a_mapped_file_cut_off_behind_a_ranks_rows_still_gives_them(tmp_path: Path) -> None:
    weight = torch.from_numpy(np.random.default_rng().integers(0, 9, (256, 1024)).astype("f4"))
    file = tmp_path / "model.safetensors"

    def read(rows: int) -> subprocess.CompletedProcess[str]:
        save_file({"w": weight}, file)
        argv = [sys.executable, "-c", _READ, str(tmp_path), str(rows)]
        root = Path(__file__).parents[4]
        return subprocess.run(argv, cwd=root, capture_output=True, text=True, timeout=60)

    half = read(128)
    assert half.returncode == 0, half.stderr
    assert float(half.stdout) == float(weight[:128].sum())
    assert read(256).returncode == -signal.SIGBUS  # what reading a page that is gone gives


def test_slices_of_a_mapped_file(tmp_path: Path) -> None:
    weight, vector = torch.randn(12, 10).to(torch.bfloat16), torch.randn(12)
    save_file({"w": weight, "b": vector}, tmp_path / "model.safetensors")
    with SafetensorsSource(tmp_path) as source:
        part = source.get("w", slice(3, 9), slice(2, 5))
        assert torch.equal(part, weight[3:9, 2:5].float())
        assert part.is_contiguous()
        assert torch.equal(source.get("b", slice(6, 12)), vector[6:])
