"""What sampling should do, written plainly: float64, full sorts, one token at a time."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from engine.sequence import Sequence
from mesh.messages import SamplingParams

Probabilities = npt.NDArray[np.float64]


def adjusted_logits(logits: npt.NDArray[np.float32], sequence: Sequence) -> Probabilities:
    """Penalties, bias and min_tokens on one row."""
    sampling = sequence.sampling
    row = logits.astype(np.float64)
    outputs = Counter(sequence.token_ids[sequence.num_prompt_tokens :])
    for token in range(len(row)):
        if token in sequence.token_ids:
            if row[token] > 0:
                row[token] /= sampling.repetition_penalty
            else:
                row[token] *= sampling.repetition_penalty
        if token in outputs:
            row[token] -= sampling.presence_penalty
            row[token] -= sampling.frequency_penalty * outputs[token]
        for biased, bias in sampling.logit_bias:
            if biased == token:
                row[token] += bias
        if token in sampling.stop_token_ids and sequence.num_output_tokens < sampling.min_tokens:
            row[token] = -np.inf
    return row


def probabilities(logits: npt.NDArray[np.float32], sampling: SamplingParams) -> Probabilities:
    """Of every token to be drawn: temperature, then top-k, then top-p, then min-p."""
    scaled = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = order
    if sampling.top_k > 0:
        kept = kept[: sampling.top_k]
    if sampling.top_p < 1:
        target = sampling.top_p * sum(weights[token] for token in kept)
        nucleus, mass = [], 0.0
        for token in kept:
            if mass >= target and nucleus:
                break
            nucleus.append(token)
            mass += weights[token]
        kept = nucleus
    kept = [token for token in kept if weights[token] >= sampling.min_p * weights.max()]
    result = np.zeros(len(weights))
    result[kept] = weights[kept]
    return result / result.sum()


def philox_uniform(seed: int, index: int) -> float:
    """Philox-4x64-10 (Salmon et al., SC'11) of counter ``index + 1`` and key ``seed``, to [0, 1).

    numpy counts up before it draws; the first of the four words gives the 53 bits.
    """
    mask = (1 << 64) - 1
    key = [seed & mask, 0]
    words = [index + 1, 0, 0, 0]
    for _ in range(10):
        high0, low0 = divmod(words[0] * 0xD2E7470EE14C6C93, 1 << 64)
        high1, low1 = divmod(words[2] * 0xCA5A826395121157, 1 << 64)
        words = [high1 ^ words[1] ^ key[0], low1, high0 ^ words[3] ^ key[1], low0]
        key = [key[0] + 0x9E3779B97F4A7C15 & mask, key[1] + 0xBB67AE8584CAA73B & mask]
    return (words[0] >> 11) * 2.0**-53
