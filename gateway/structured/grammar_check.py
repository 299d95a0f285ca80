"""Compiles the grammars of requests before anything is sent to a worker."""

from __future__ import annotations

import asyncio
import collections
from concurrent.futures import ThreadPoolExecutor

from mesh.errors import GrammarFailed, Overloaded
from mesh.model_text.grammar import GrammarVocabulary, check, failing_by_name, grammar_executor
from mesh.model_text.tokenizer import Tokenizer

_MAX_WAIT_S = 5.0
"""For the thread's other work too; limits keep one grammar below a second."""

_MAX_REMEMBERED = 256


class GrammarChecker:
    """Owns one thread, started by the first grammar; ``close`` stops it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: GrammarVocabulary | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._accepted: collections.OrderedDict[str, None] = collections.OrderedDict()

    def close(self) -> None:
        """Stop the thread after what it is doing."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def prepare(self) -> None:
        """Start the thread and read the vocabulary in it, ahead of the first request."""
        if self._executor is None:
            self._executor = grammar_executor("grammar")
            self._executor.submit(self._load)

    async def check(self, grammar: str, param: str) -> None:
        """Return when ``grammar`` is known to compile.

        Raises:
            GrammarFailed: it does not; ``param`` and the message name the field.
            Overloaded: there are too many to check.
        """
        if grammar in self._accepted:
            self._accepted.move_to_end(grammar)
            return
        self.prepare()
        assert self._executor is not None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await loop.run_in_executor(self._executor, self._compile, grammar)
        except TimeoutError:
            raise Overloaded("too many grammars wait to be checked") from None
        except GrammarFailed as error:
            raise GrammarFailed(f"{param}: {error}", param=param) from error
        self._accepted[grammar] = None
        if len(self._accepted) > _MAX_REMEMBERED:
            self._accepted.popitem(last=False)

    def _load(self) -> GrammarVocabulary:
        if self._vocabulary is None:
            self._vocabulary = GrammarVocabulary(self._tokenizer, self._tokenizer.vocab_size)
        return self._vocabulary

    @failing_by_name()
    def _compile(self, grammar: str) -> None:
        matcher = self._load().compile(grammar)
        matcher.compute_bitmask()  # finds what nothing can satisfy
        check(matcher)
