"""Output tokens to text, one token at a time."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Incremental decoder of one output: the joined pieces equal the decoded whole.

    A character split over tokens comes out with its last token; bytes that can no longer become
    UTF-8 come out as U+FFFD at once.
    """

    __slots__ = ("_decode", "_pieces")

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """Args: pieces: The bytes behind each token id (``Tokenizer.pieces``)."""
        self._pieces = pieces
        self._decode = _utf8("replace").decode

    def push(self, token_id: int) -> str:
        """Text that became complete with this token; often "" in multi-byte scripts."""
        try:
            return self._decode(self._pieces[token_id])
        except IndexError:  # logits may be padded past the vocabulary
            return ""

    def finish(self) -> str:
        """What was held back, incomplete bytes replaced by U+FFFD."""
        return self._decode(b"", True)
