"""Chooses the next token of every sampled row.

The random number of a token is a function of (seed, output index) alone, so a request draws the
same numbers whatever batch, worker or attempt computes it (counter-based, Salmon et al., SC'11).
Order of the steps: penalties and bias → grammar → temperature → top-k → top-p → min-p → one draw by
inverse CDF in vocabulary order. No sorting: the top-k and top-p thresholds are found by selection.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.sequence import Sequence
from mesh.messages import SamplingParams, TokenLogprobs

FloatRow = npt.NDArray[np.float32]


@dataclass(slots=True, frozen=True)
class SampledToken:
    """One row's outcome."""

    token_id: int
    logprobs: TokenLogprobs | None


def sample(logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> list[SampledToken]:
    """Choose one token per row.

    Args:
        logits: [N, V] float32; may be modified.
        sequences: the N sequences, each before the new token is appended.
    """
    needs_row_work = [
        sequence.sampling.temperature != 0 or needs_host(sequence) for sequence in sequences
    ]
    greedy = logits.argmax(dim=1).tolist() if not all(needs_row_work) else []
    rows = logits.numpy()
    results = []
    for index, sequence in enumerate(sequences):
        if needs_row_work[index]:
            results.append(_sample_row(rows[index], sequence))
        else:
            results.append(SampledToken(greedy[index], None))
    return results


def uniform(seed: int, index: int) -> float:
    """The uniform number in [0, 1) that belongs to output ``index`` of a request with ``seed``."""
    bits = np.random.Philox(key=np.uint64(seed & 0xFFFFFFFFFFFFFFFF), counter=index)
    return float(np.random.Generator(bits).random())


def needs_host(sequence: Sequence) -> bool:
    """Whether choosing its next token takes more than logits: its earlier tokens, or a mask."""
    sampling = sequence.sampling
    return (
        sampling.num_logprobs >= 0
        or sequence.grammar_state is not None
        or _changes_logits(sampling, sequence.next_output_index)
    )


def _changes_logits(sampling: SamplingParams, num_output_tokens: int) -> bool:
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.bad_words
        or num_output_tokens < sampling.min_tokens
    )


def _sample_row(row: FloatRow, sequence: Sequence) -> SampledToken:
    sampling = sequence.sampling
    original = row.copy() if sampling.num_logprobs >= 0 else row
    if _changes_logits(sampling, sequence.num_output_tokens):
        _adjust_logits(row, sequence)
    if sequence.grammar_state is not None:
        assert sequence.grammar_state.forbidden is not None, "collected before"
        np.copyto(row, -np.inf, where=sequence.grammar_state.forbidden)
    if sampling.temperature == 0:
        token_id = int(row.argmax())
    else:
        token_id = _draw(row, sampling, uniform(sampling.seed, sequence.next_output_index))
    if sampling.num_logprobs < 0:
        return SampledToken(token_id, None)
    return SampledToken(token_id, _logprobs(original, token_id, sampling.num_logprobs))


def _adjust_logits(row: FloatRow, sequence: Sequence) -> None:
    """Penalties (repetition: Keskar et al., arXiv:1909.05858), bias and masks, in place."""
    sampling = sequence.sampling
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.asarray(sequence.token_ids))
        values = row[seen]
        factor = np.float32(sampling.repetition_penalty)
        row[seen] = np.where(values > 0, values / factor, values * factor)
    if sampling.presence_penalty or sampling.frequency_penalty:
        outputs = np.asarray(sequence.token_ids[sequence.num_prompt_tokens :], np.int64)
        seen, counts = np.unique(outputs, return_counts=True)
        row[seen] -= np.float32(sampling.presence_penalty) + (
            np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
        )
    for token_id, bias in sampling.logit_bias:
        row[token_id] += np.float32(bias)
    if sampling.allowed_token_ids:
        allowed = list(sampling.allowed_token_ids)
        kept = row[allowed]
        row.fill(-np.inf)
        row[allowed] = kept
    if sampling.bad_words:
        row[_bad_next_tokens(sequence)] = -np.inf
    if sequence.num_output_tokens < sampling.min_tokens and sequence.grammar_state is None:
        row[list(sampling.stop_token_ids)] = -np.inf


def _bad_next_tokens(sequence: Sequence) -> list[int]:
    """Tokens that would complete one of the bad words at the end of the output."""
    token_ids = sequence.token_ids
    start = sequence.num_prompt_tokens
    found = []
    for word in sequence.sampling.bad_words:
        begun = len(word) - 1
        if sequence.num_output_tokens < begun:
            continue
        if not begun or tuple(token_ids[max(start, len(token_ids) - begun) :]) == word[:-1]:
            found.append(word[-1])
    return found


def _draw(row: FloatRow, sampling: SamplingParams, u: float) -> int:
    """Draw by inverse CDF over the tokens that survive top-k, top-p and min-p."""
    below_largest = row.astype(np.float64)
    below_largest -= below_largest.max()
    with np.errstate(over="ignore"):  # a tiny temperature leaves the largest alone
        weights = np.exp(below_largest / sampling.temperature)
    size = len(weights)
    if 0 < sampling.top_k < size:
        smallest = np.partition(weights, size - sampling.top_k)[size - sampling.top_k]
        weights[weights < smallest] = 0.0
    if sampling.top_p < 1.0:
        weights[weights < _top_p_threshold(weights, sampling.top_p)] = 0.0
    if sampling.min_p > 0.0:
        weights[weights < sampling.min_p] = 0.0  # the largest weight is 1
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return min(index, int(np.flatnonzero(weights)[-1]))


def _top_p_threshold(weights: npt.NDArray[np.float64], top_p: float) -> float:
    """Smallest weight in the smallest set of largest weights that holds ``top_p`` of the mass.

    Sorts only as many of the largest weights as are needed, growing by powers of 8.
    """
    target = top_p * weights.sum()
    count = 64
    while True:
        count = min(count, len(weights))
        largest = np.partition(weights, len(weights) - count)[len(weights) - count :]
        largest[::-1].sort()
        cumulative = np.cumsum(largest)
        if cumulative[-1] >= target or count == len(weights):
            return float(largest[min(int(np.searchsorted(cumulative, target)), count - 1)])
        count *= 8


def _logprobs(row: FloatRow, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-softmax of the model's own logits, before penalties and temperature."""
    values = row.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    top: tuple[tuple[int, float], ...] = ()
    num_top = min(num_top, len(values))
    if num_top > 0:
        best = np.argpartition(values, -num_top)[-num_top:]
        best = best[np.lexsort((best, -values[best]))]
        top = tuple((int(i), float(values[i])) for i in best)
    return TokenLogprobs(token_id=token_id, logprob=float(values[token_id]), top=top)
