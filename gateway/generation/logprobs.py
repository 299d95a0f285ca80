"""Log-probabilities in the shapes of the two OpenAI endpoints."""

from __future__ import annotations

from typing import Any

from mesh.messages import TokenLogprobs
from mesh.model_text.tokenizer import Tokenizer

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def chat_logprobs(entry: TokenLogprobs, names: TokenNames) -> dict[str, Any]:
    """One item of ``logprobs.content``."""
    top = [_chat_token(token_id, value, names) for token_id, value in entry.top]
    return {**_chat_token(entry.token_id, entry.logprob, names), "top_logprobs": top}


def _chat_token(token_id: int, value: float, names: TokenNames) -> dict[str, Any]:
    data = names.tokenizer.token_bytes(token_id)
    return {"token": names.of(token_id), "logprob": max(value, _LOWEST), "bytes": list(data)}


class TokenNames:
    """How logprobs write a token: its text, or ``token_id:17`` where the client asks for ids."""

    __slots__ = ("_as_ids", "tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self.tokenizer = tokenizer
        self._as_ids = as_ids

    def of(self, token_id: int) -> str:
        """The token as it is shown."""
        if self._as_ids:
            return f"token_id:{token_id}"
        return self.tokenizer.token_bytes(token_id).decode("utf-8", "replace")


class CompletionLogprobs:
    """Collects the parallel lists of /v1/completions, for a whole choice or for each chunk."""

    def __init__(self, names: TokenNames, *, offset: int = 0) -> None:
        """Args: offset: Characters of the text before the first token."""
        self._name = names.of
        self._offset = offset
        self._clear()

    def add(self, entry: TokenLogprobs, text: str) -> None:
        """Add one token, which added ``text`` to the choice."""
        self._tokens.append(self._name(entry.token_id))
        self._values.append(max(entry.logprob, _LOWEST))
        top = {self._name(token_id): max(value, _LOWEST) for token_id, value in entry.top}
        self._top.append(top or None)
        self._offsets.append(self._offset)
        self._offset += len(text)

    def take(self) -> dict[str, Any]:
        """The object for the tokens added since the last call."""
        taken = {
            "tokens": self._tokens,
            "token_logprobs": self._values,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }
        self._clear()
        return taken

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._values: list[float] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []
