"""Output tokens to text, one token at a time."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

_MAX_UNFINISHED = 3
_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Incremental decoder of one output: the joined pieces equal the decoded whole.

    A character split over tokens comes out with its last token; bytes that can no longer become
    UTF-8 come out as U+FFFD at once. A character that the prompt began is part of the output:

        prompt  … "日" E6 9C │ AC "語"  output        text: "本語"
                       unfinished
    """

    __slots__ = ("_decode", "_pieces")

    def __init__(self, pieces: Sequence[bytes], unfinished: bytes = b"") -> None:
        """Prepare.

        Args:
            pieces: The bytes behind each token id (``Tokenizer.pieces``).
            unfinished: ``unfinished_bytes`` of the prompt.
        """
        self._pieces = pieces
        self._decode = _utf8("replace").decode
        self._decode(unfinished)

    def push(self, token_id: int) -> str:
        """Text that became complete with this token; often "" in multi-byte scripts."""
        try:
            return self._decode(self._pieces[token_id])
        except IndexError:  # logits may be padded past the vocabulary
            return ""

    def finish(self) -> str:
        """What was held back, incomplete bytes replaced by U+FFFD."""
        return self._decode(b"", True)


def unfinished_bytes(pieces: Sequence[bytes], token_ids: Sequence[int]) -> bytes:
    """The bytes at the end of ``token_ids`` that begin a character and do not end it; at most 3."""
    tail = b""
    for token_id in reversed(token_ids):
        tail = (pieces[token_id] if token_id < len(pieces) else b"") + tail
        if len(tail) >= _MAX_UNFINISHED:
            break
    decoder = _utf8("replace")
    decoder.decode(tail[-_MAX_UNFINISHED:])
    return decoder.getstate()[0]
