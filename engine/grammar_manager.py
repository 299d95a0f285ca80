"""Compiles grammars and makes masks, in threads beside the model's.

    attach ──▶ compile (thread) ──▶ ready ──▶ begin ─▶ mask (thread, beside the forward) ─▶ collect
                                      ▲                         │ not there in time
                                      └──── mask done ◀── late ─┘   the row is not sampled: its
                                                                    last token is computed again

Nothing waits on a grammar for long: its sequence is held out of the steps while a thread works for
it, and everything else goes on.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from llguidance import LLMatcher

from engine.grammar_state import GrammarState
from engine.sequence import Sequence
from mesh.errors import ConfigError, GrammarFailed
from mesh.model_text.grammar import GrammarVocabulary, failing_by_name, grammar_executor
from mesh.model_text.model_files import ModelFiles
from mesh.model_text.tokenizer import load_tokenizer

MASK_WAIT_S = 0.010
"""How long a step that has been computed waits for masks; a mask takes 0.03 ms, rarely 1 ms."""

_MAX_CACHED = 16
"""Compiled grammars kept: agents send the same one with every call."""


class GrammarManager:
    """Owns the two threads and the compiled grammars of one engine; no cost until the first one."""

    def __init__(self, files: ModelFiles, num_tokens: int) -> None:
        """Args: files: the model's, for its tokenizer. num_tokens: width of the logits."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called from a thread when a held sequence may go on."""
        self.num_late = 0
        """Tokens put off because their mask was not there in time."""
        self._files = files
        self._num_tokens = num_tokens
        self._vocabulary: GrammarVocabulary | None = None
        self._compiled: collections.OrderedDict[str, LLMatcher] = collections.OrderedDict()
        self._compiler: ThreadPoolExecutor | None = None
        self._masker: ThreadPoolExecutor | None = None

    def prepare(self) -> None:
        """Start the threads and read the vocabulary in one of them, ahead of the first request."""
        if self._compiler is None:
            self._compiler = grammar_executor("grammar")
            self._masker = grammar_executor("mask")
            self._compiler.submit(self._load)

    def attach(self, sequence: Sequence) -> None:
        """Begin to compile the grammar of a sequence that has one."""
        if sequence.sampling.grammar:
            self.prepare()
            assert self._compiler is not None
            state = GrammarState(sequence.sampling.grammar)
            sequence.grammar_state = state
            self._run(self._compiler, state, partial(self._compile, state))

    def begin(self, sequences: Iterable[Sequence]) -> None:
        """Start the masks of the tokens that this step samples."""
        for sequence in sequences:
            state = sequence.grammar_state
            if state is None or state.is_prepared_for(sequence.num_output_tokens):
                continue
            assert self._masker is not None
            tokens = sequence.token_ids[sequence.num_prompt_tokens + state.num_consumed :]
            work = partial(state.advance, tokens, self._num_tokens, sequence.sampling)
            self._run(self._masker, state, work)

    def collect(
        self, sequences: Iterable[Sequence]
    ) -> tuple[list[Sequence], list[tuple[Sequence, GrammarFailed]]]:
        """Wait for the masks, together at most ``MASK_WAIT_S``.

        Returns:
            Sequences whose mask is late, and those that cannot go on with the reason.
        """
        late: list[Sequence] = []
        failed: list[tuple[Sequence, GrammarFailed]] = []
        end_s: float | None = None
        for sequence in sequences:
            if sequence.grammar_state is None:
                continue
            now_s = time.monotonic()
            end_s = now_s + MASK_WAIT_S if end_s is None else end_s
            try:
                sequence.grammar_state.result(max(0.0, end_s - now_s))
            except TimeoutError:
                late.append(sequence)
                self.num_late += 1
            except GrammarFailed as error:
                failed.append((sequence, error))
        return late, failed

    def _run(
        self, executor: ThreadPoolExecutor, state: GrammarState, work: Callable[[], None]
    ) -> None:
        job = executor.submit(failing_by_name()(work))
        state.start(job)
        job.add_done_callback(lambda _: self.on_ready())

    def _load(self) -> GrammarVocabulary:
        if self._vocabulary is None:
            tokenizer = load_tokenizer(self._files)
            self._vocabulary = GrammarVocabulary(tokenizer, self._num_tokens)
        return self._vocabulary

    def _compile(self, state: GrammarState) -> None:
        grammar = state.grammar
        compiled = self._compiled.get(grammar)
        if compiled is None:
            try:
                compiled = self._load().compile(grammar)
            except ConfigError as error:
                raise GrammarFailed(f"this worker follows no grammar: {error}") from error
            self._compiled[grammar] = compiled
            if len(self._compiled) > _MAX_CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        state.adopt(compiled.deep_copy())
