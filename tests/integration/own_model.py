"""A random Llama with grouped queries and its own byte-level BPE, as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

_CORPUS = Path(__file__).parent / "perplexity.txt"
_END = "<|im_end|>"
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_own_model(folder: Path, **config: Any) -> None:
    """Write it; ``config`` overrides fields of its ``LlamaConfig``."""
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
    fields: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            eos_token_id=tokenizer.eos_token_id,
            tie_word_embeddings=False,
            **{**fields, **config},
        )
    )
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    model.save_pretrained(folder)
