"""Text to token ids and back, for one served model.

Encoding is the `tokenizers` library's. Decoding goes through a table of the exact bytes behind
every token id: output text is those bytes, joined, as UTF-8. That makes incremental decoding exact
and cheap, for the two families that LLMs use: byte-level BPE and
SentencePiece with byte fallback.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from mesh.errors import ConfigError
from mesh.model_text.gguf import read_gguf_metadata
from mesh.model_text.gguf_tokenizer import build_gguf_tokenizer
from mesh.model_text.model_files import ModelFiles

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """Tokenizer of one model; thread-safe (encoding releases the GIL)."""

    def __init__(
        self, inner: tokenizers.Tokenizer, *, bos_id: int | None = None, add_bos: bool | None = None
    ) -> None:
        """Wrap ``inner``.

        Args:
            inner: The library's tokenizer.
            bos_id: Beginning-of-sequence id; never put twice at the start of a prompt.
            add_bos: Whether a plain prompt starts with BOS; None leaves it to ``inner``'s own
                post-processor.
        """
        self._inner = inner
        self.bos_id = bos_id
        self._add_bos = add_bos
        self.special_ids: dict[str, int] = {}
        """Content of every special (control) token → id."""
        self.pieces, self.pieces_with_special = self._build_pieces()

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to this, exclusive."""
        return len(self.pieces)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``; special tokens written in the text become themselves."""
        by_library = add_special_tokens and self._add_bos is None
        # Unlike encode(), the batch call releases the GIL; "fast" leaves out character offsets.
        [encoding] = self._inner.encode_batch_fast([text], add_special_tokens=by_library)
        ids: list[int] = encoding.ids
        if self.bos_id is None or not add_special_tokens:
            return ids
        if self._add_bos and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        if by_library and ids[:2] == [self.bos_id, self.bos_id]:
            return ids[1:]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        pieces = self.pieces if skip_special_tokens else self.pieces_with_special
        data = b"".join(pieces[index] for index in ids if index < len(pieces))
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes behind one token, special tokens as their name."""
        if token_id < len(self.pieces_with_special):
            return self.pieces_with_special[token_id]
        return b""

    def entry(self, token_id: int) -> str:
        """The vocabulary's own spelling of a token, such as ``Ġhello``."""
        return self._inner.id_to_token(token_id) or ""

    def _build_pieces(self) -> tuple[list[bytes], list[bytes]]:
        vocab: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        with_special = [b""] * (max(vocab.values()) + 1)
        to_bytes = _piece_bytes(self._inner)
        for token, index in vocab.items():
            with_special[index] = to_bytes(token)
        visible = list(with_special)
        for index, added in self._inner.get_added_tokens_decoder().items():
            with_special[index] = added.content.encode()
            visible[index] = b"" if added.special else with_special[index]
            if added.special:
                self.special_ids[added.content] = index
        return visible, with_special


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer of a model, for those who need nothing else of it.

    Raises:
        ConfigError: the model has none, or one that pdmesh does not know.
    """
    if files.kind == "gguf":
        return load_gguf_tokenizer(read_gguf_metadata(files.path))
    return load_hf_tokenizer(files.path)


def load_hf_tokenizer(folder: Path) -> Tokenizer:
    """Load ``tokenizer.json`` of a Hugging Face folder.

    Raises:
        ConfigError: the file is missing, broken or decodes in a way pdmesh does not know.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"model: {file} does not exist")
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"model: {file} is not a tokenizer: {error}") from error
    inner.no_truncation()
    inner.no_padding()
    bos = special_token(read_json(folder / "tokenizer_config.json"), "bos_token")
    return Tokenizer(inner, bos_id=inner.token_to_id(bos) if bos else None)


def load_gguf_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Build the tokenizer of a GGUF header.

    Raises:
        ConfigError: as ``build_gguf_tokenizer``.
    """
    by_default = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get(
        "tokenizer.ggml.pre"
    ) in ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
    return Tokenizer(
        build_gguf_tokenizer(metadata),
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", by_default)),
    )


def read_json(file: Path) -> dict[str, Any]:
    """Content of an optional JSON file; {} when it does not exist.

    Raises:
        ConfigError: it exists and is not a JSON object.
    """
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model: {file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"model: {file} is not a JSON object")
    return content


def special_token(tokenizer_config: dict[str, Any], key: str) -> str:
    """Content of a special token in tokenizer_config.json (a string or an AddedToken object)."""
    value = tokenizer_config.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _piece_bytes(inner: tokenizers.Tokenizer) -> Any:
    """The function from a vocabulary entry to its bytes, by the tokenizer's decoder."""
    kinds = _decoder_kinds(inner)
    if "ByteLevel" in kinds:
        return _byte_level_bytes
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return _sentencepiece_bytes
    raise ConfigError(
        f"model: tokenizer decoder {sorted(kinds)} is not byte-level or byte-fallback"
    )


def _decoder_kinds(inner: tokenizers.Tokenizer) -> set[str]:
    if inner.decoder is None:
        return set()
    state = json.loads(inner.decoder.__getstate__())
    stages = state["decoders"] if state["type"] == "Sequence" else [state]
    return {stage["type"] for stage in stages}


def _sentencepiece_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    if match:
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ").encode()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in character of every byte (openai/gpt-2 `src/encoder.py`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()
