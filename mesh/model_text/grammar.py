"""What an output must follow, compiled: one place for the gateway, which checks, and the workers.

A grammar is text in llguidance's Lark dialect (github.com/guidance-ai/llguidance docs/syntax.md),
JSON schemas inside. The library works on bytes and token ids. All it is given comes from clients,
so size, nesting and the work of compiling and of one token are limited here; both sides use the
same limits, so that what the gateway accepts compiles on the workers.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from mesh.errors import GrammarFailed
from mesh.model_text.tokenizer import Tokenizer

_logger = logging.getLogger(__name__)

MAX_GRAMMAR_BYTES = 256 << 10

_MAX_MESSAGE_CHARS = 300
_SOURCE_LINE = re.compile(r"\s+(\d+ \||\^+$)|.{200}")
"""Lines of an error message that show the grammar again."""

_STACK_BYTES = 256 << 20
"""Address space, not memory. The library recurses along chains of rules; the longest chain that
fits ``MAX_GRAMMAR_BYTES`` needs about half of this, and an overflow would end the process."""

_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # about 20 ms
    step_lexer_fuel=200_000,  # about 15 ms
    step_max_items=50_000,  # about 3 ms
    max_lexer_states=20_000,  # about 40 MB
    max_grammar_size=500_000,
    verbose_errors=False,
)


class _Source:
    """What ``TokenizerWrapper`` reads: bytes of every id, and which ids are no text."""

    def __init__(self, tokenizer: Tokenizer, num_tokens: int) -> None:
        pieces = tokenizer.pieces_with_special[:num_tokens]
        padding = [b""] * (num_tokens - len(pieces))
        special = (index for index in tokenizer.special_ids.values() if index < num_tokens)
        self.tokens = [*pieces, *padding, b"<end of grammar>"]
        self.eos_token_id = num_tokens
        self.bos_token_id = None
        self.special_token_ids = [*sorted(special), num_tokens]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False)


class GrammarVocabulary:
    """A model's tokens as grammars see them, and one more: ``end_id`` says "may end here".

    Which real tokens end an answer is the request's business, so none of them is known here.
    """

    def __init__(self, tokenizer: Tokenizer, num_tokens: int) -> None:
        """Build the trie of all tokens; about 0.15 s for a 49k vocabulary.

        Args:
            tokenizer: the model's.
            num_tokens: ids run from 0 to this, exclusive; those without a piece never match.
        """
        self.num_tokens = num_tokens
        self.end_id = num_tokens
        self.special_ids = tokenizer.special_ids
        self._inner = LLTokenizer(TokenizerWrapper(_Source(tokenizer, num_tokens)))

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher at the start of ``grammar``. Call it in a ``grammar_executor``.

        Raises:
            GrammarFailed: not a grammar, one that nothing follows, or over a limit.
        """
        if len(grammar) > MAX_GRAMMAR_BYTES or len(grammar.encode()) > MAX_GRAMMAR_BYTES:
            raise GrammarFailed(f"the grammar is over {MAX_GRAMMAR_BYTES} bytes")
        matcher = LLMatcher(self._inner, grammar, log_level=0, limits=_LIMITS)
        check(matcher)
        return matcher


def check(matcher: LLMatcher) -> None:
    """Raise what went wrong in ``matcher``, which reports nothing by itself.

    Raises:
        GrammarFailed: it is in its error state.
    """
    if matcher.is_error():
        lines = matcher.get_error().splitlines()
        told = " ".join(line.strip() for line in lines if not _SOURCE_LINE.match(line))
        raise GrammarFailed(told[:_MAX_MESSAGE_CHARS] or "the grammar cannot be followed")


@contextmanager
def failing_by_name() -> Iterator[None]:
    """Turn whatever the library raises into the request's failure: no grammar may end a worker.

    Raises:
        GrammarFailed: what happened inside.
    """
    try:
        yield
    except GrammarFailed:
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        _logger.exception("grammar library failed")
        raise GrammarFailed("the grammar library failed") from error


_stack_size_lock = threading.Lock()


def grammar_executor(name: str) -> ThreadPoolExecutor:
    """One thread with a stack for deep grammars; the caller shuts it down."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    with _stack_size_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            executor.submit(int).result()  # starts the thread
        finally:
            threading.stack_size(before)
    return executor
