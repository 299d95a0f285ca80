"""The tiny Llama with a tokenizer: its 95 first tokens are the printable ASCII characters."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

from tests.unit.engine.tiny_llama import VOCAB_SIZE, TinyLlama

END_ID = 95
"""A special token that a request may name as its stop token."""

_FIRST = 32


class CharacterLlama(TinyLlama):
    """Its text can be read, so grammars can be followed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        vocab = {chr(_FIRST + index): index for index in range(1, END_ID)} | {"Ġ": 0}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
        assert tokenizer.get_vocab_size() == VOCAB_SIZE
        tokenizer.save(str(folder / "tokenizer.json"))


def text(tokens: list[int]) -> str:
    """The characters, without a last ``END_ID``."""
    return "".join(chr(_FIRST + token) for token in tokens if token != END_ID)


def tokens_of(characters: str) -> list[int]:
    """The inverse of ``text``."""
    return [ord(character) - _FIRST for character in characters]
