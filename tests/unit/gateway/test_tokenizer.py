"""Tokenizers built from GGUF headers and Hugging Face folders."""

from __future__ import annotations

import json
import random
from pathlib import Path

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from gateway.prompts.served_model import ServedModel
from mesh.errors import ConfigError
from mesh.model_text.gguf import read_gguf_metadata
from mesh.model_text.gguf_tokenizer import build_gguf_tokenizer
from mesh.model_text.model_files import resolve_model
from mesh.model_text.tokenizer import Tokenizer, load_gguf_tokenizer, load_hf_tokenizer

# Made by llama.cpp (llama_tokenize, parse_special) over the packaged model, which agrees with
# transformers wherever there is no digit after white space: transformers 5.24 drops the digit
# splitting when it converts this GGUF.
GOLDEN = json.loads((Path(__file__).parent / "smollm2_tokens.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("text", GOLDEN)
def test_smollm2_equals_llama_cpp(model: ServedModel, text: str) -> None:
    assert model.tokenizer.encode(text, add_special_tokens=True) == GOLDEN[text]


def random_texts() -> list[str]:
    alphabet = [
        *map(chr, range(32, 127)),
        *("\n", "\t", " ", "  ", "é", "日", "本", "😀", "٣", "½", "\u00a0", "\u200d", "ا", "ह"),
    ]
    chooser = random.Random(7)
    return ["".join(chooser.choices(alphabet, k=chooser.randint(1, 80))) for _ in range(300)]


def test_smollm2_equals_its_original_definition(model: ServedModel) -> None:
    """HuggingFaceTB/SmolLM2 tokenizer.json: Digits(individual), then ByteLevel with its regex."""
    original = tokenizers.Tokenizer.from_str(model.tokenizer._inner.to_str())
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    for text in random_texts():
        ids = model.tokenizer.encode(text, add_special_tokens=False)
        assert ids == original.encode(text).ids
        assert model.tokenizer.decode(ids) == text


def test_header_equals_the_gguf_package() -> None:
    path = resolve_model("").path
    metadata = read_gguf_metadata(path)
    reader = gguf.GGUFReader(path)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            assert metadata[key] == field.contents()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GGUF",
        b"GGML" + bytes(40),
        b"GGUF" + (9).to_bytes(4, "little") + bytes(16),
        b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1 << 60).to_bytes(8, "little"),
        b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little") + b"\xff" * 8,
    ],
)
def test_broken_header_is_a_config_error(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"broken\.gguf"):
        read_gguf_metadata(file)


SPM_PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
SPM_SCORED = {"▁": -1.0, "h": -2.0, "i": -3.0, "t": -4.0, "hi": -5.0, "▁hi": -6.0, "it": -5.5}


def sentencepiece_metadata(**fields: object) -> dict[str, object]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*SPM_PIECES, *SPM_SCORED],
        "tokenizer.ggml.scores": [0.0] * len(SPM_PIECES) + list(SPM_SCORED.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(SPM_SCORED),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
        **fields,
    }


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes() -> None:
    tokenizer = load_gguf_tokenizer(sentencepiece_metadata())
    names = dict(enumerate([*SPM_PIECES, *SPM_SCORED]))
    ids = tokenizer.encode("hit é", add_special_tokens=True)
    assert [names[i] for i in ids] == ["<s>", "▁hi", "t", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == " hit é"
    assert tokenizer.encode("hi", add_special_tokens=False) == ids[1:2]


def test_bos_is_added_as_the_header_says_and_never_twice() -> None:
    plain = load_gguf_tokenizer(sentencepiece_metadata(**{"tokenizer.ggml.add_bos_token": False}))
    assert plain.encode("hi", add_special_tokens=True)[0] != 1
    with_bos = load_gguf_tokenizer(sentencepiece_metadata())
    assert with_bos.encode("<s>hi", add_special_tokens=True).count(1) == 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokenizer.ggml.model", "bert", "tokenizer.ggml.model 'bert'"),
        ("tokenizer.ggml.tokens", None, "tokenizer.ggml.tokens"),
        ("tokenizer.ggml.scores", [1.0], "tokenizer.ggml.scores"),
    ],
)
def test_unknown_vocabulary_is_a_config_error(field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_gguf_tokenizer(sentencepiece_metadata(**{field: value}))


def test_unknown_split_is_a_config_error() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.pre": "novel",
    }
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.pre 'novel'"):
        build_gguf_tokenizer(metadata)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "a 123x  y", ["a", " 123", "x", " ", " y"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
        ("llama-bpe", "I'LL 12345\n\n x", ["I", "'LL", " ", "123", "45", "\n\n", " x"]),
        ("qwen2", "v 12 !\n", ["v", " ", "1", "2", " !\n"]),
    ],
)
def test_words_of_each_split(pre: str, text: str, words: list[str]) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": [],
    }
    split = build_gguf_tokenizer(metadata).pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in split] == words


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    """A small byte-level tokenizer.json whose post-processor puts BOS first."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=["<s>", "</s>"],
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["hello hello world"], trainer)
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    )
    return tmp_path


def test_hf_folder(hf_folder: Path) -> None:
    tokenizer: Tokenizer = load_hf_tokenizer(hf_folder)
    assert tokenizer.special_ids == {"<s>": 0, "</s>": 1}
    ids = tokenizer.encode("hello é", add_special_tokens=True)
    assert ids[0] == 0
    assert tokenizer.decode(ids) == "hello é"
    assert tokenizer.encode("<s>hello", add_special_tokens=True).count(0) == 1
    assert tokenizer.encode("hello", add_special_tokens=False).count(0) == 0


def test_hf_folder_without_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_hf_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        load_hf_tokenizer(tmp_path)


def test_unknown_decoder_is_a_config_error(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    inner.decoder = decoders.WordPiece()
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="decoder"):
        load_hf_tokenizer(tmp_path)
