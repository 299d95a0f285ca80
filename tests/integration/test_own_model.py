"""``./pdmesh up --model FOLDER`` with a Hugging Face folder made here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
import tokenizers
import torch
import transformers

from tests.integration.reference import Reference
from tests.integration.running_cluster import RunningCluster, ask
from tests.integration.up_process import Up

_CORPUS = Path(__file__).parent / "perplexity.txt"
_END = "<|im_end|>"
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXTS = ("The river", "snow lies until", "Zwölf 🚣 boats\n\n", "x" * 90)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with grouped queries and its own byte-level BPE."""
    folder = tmp_path_factory.mktemp("own-model") / "River-Llama"
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|im_start|>", _END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train([str(_CORPUS)], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=_END)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    model.save_pretrained(folder)
    return folder


async def test_it_is_served_as_transformers_runs_it(
    start: Callable[..., Up], folder: Path, session: aiohttp.ClientSession
) -> None:
    reference = Reference(folder)
    up = start("--port", "0", "--model", str(folder), "--weights", "fp32", "--kv-blocks", "64")
    cluster = RunningCluster(up)
    assert cluster.model == "River-Llama"
    assert cluster.get("/v1/models")["data"][0]["max_model_len"] == 512
    prompts = [*_TEXTS, [{"role": "user", "content": "Where does the river begin?"}]]
    for prompt in prompts:
        answer = await ask(cluster, session, prompt, max_tokens=24)
        assert answer.prompt_ids == reference.encode(prompt)
        assert reference.mismatches(answer.prompt_ids, answer.token_ids) == []
    cluster.wait_idle()


async def test_it_is_served_with_the_default_flags(
    start: Callable[..., Up], folder: Path, session: aiohttp.ClientSession
) -> None:
    cluster = RunningCluster(start("--port", "0", "--model", str(folder)))
    answer = await ask(cluster, session, _TEXTS[0], max_tokens=24, ignore_eos=True)
    assert len(answer.token_ids) == 24
    cluster.wait_idle()
