"""Draws the tokens of a step's rows on the device, from parameters staged like its inputs."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from triton import next_power_of_2

from engine.backends.gpu.device import Device
from engine.backends.gpu.kernels.sampling.sample import sample
from engine.backends.gpu.kernels.sampling.sample_workspace import CHUNK, MAX_CHUNKS, SampleWorkspace
from engine.backends.gpu.staging import Staging, section_bytes
from engine.philox import uniforms
from engine.sequence import Sequence

_BELOW_ONE = np.float32(1.0 - 2.0**-24)


@dataclass(slots=True, frozen=True)
class SamplingRows:
    """What the kernel reads of N rows, on the device."""

    temperature: torch.Tensor
    """[N] float32; 0: the largest logit."""
    top_k: torch.Tensor
    """[N] int32; 0: all."""
    top_p: torch.Tensor
    """[N] float32; 1: all."""
    min_p: torch.Tensor
    """[N] float32; 0: all."""
    uniforms: torch.Tensor
    """[N] float32 in [0, 1)."""
    is_cut: bool
    """Whether any row has a top_k or top_p, for which the vocabulary is searched."""


class Sampler:
    """Owns what the parameters are staged in, and what the kernels hand on to each other."""

    def __init__(self, device: Device, num_rows: int, vocab_size: int) -> None:
        """For up to ``num_rows`` rows."""
        self._staging = Staging(device, 5 * section_bytes(num_rows, np.float32))
        self._workspace = SampleWorkspace.allocate(
            device.torch_device,
            max_rows=num_rows,
            vocabulary=vocab_size,
            chunk=max(CHUNK, next_power_of_2(-(-vocab_size // MAX_CHUNKS))),
        )

    def stage(self, sequences: SequenceOf[Sequence], num_rows: int) -> SamplingRows:
        """Those of the next token of each sequence; rows past them are greedy."""
        is_cut = any(s.sampling.top_k > 0 or s.sampling.top_p < 1.0 for s in sequences)
        return SamplingRows(**self._staging.stage(_parameters(sequences, num_rows)), is_cut=is_cut)

    def draw(self, logits: torch.Tensor, rows: SamplingRows, out: torch.Tensor) -> None:
        """Write a token of every row of ``logits`` [N, V] to ``out`` [N] int32."""
        sample(
            logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.uniforms,
            out=out, workspace=self._workspace, use_top_k=rows.is_cut, use_top_p=rows.is_cut,
        )  # fmt: skip


def _parameters(
    sequences: SequenceOf[Sequence], num_rows: int
) -> dict[str, npt.NDArray[np.generic]]:
    temperature = np.zeros(num_rows, np.float32)
    top_k = np.zeros(num_rows, np.int32)
    top_p = np.ones(num_rows, np.float32)
    min_p = np.zeros(num_rows, np.float32)
    numbers = np.zeros(num_rows, np.float32)
    random = [row for row, s in enumerate(sequences) if s.sampling.temperature > 0]
    if random:
        chosen = [sequences[row] for row in random]
        temperature[random] = [s.sampling.temperature for s in chosen]
        top_k[random] = [s.sampling.top_k for s in chosen]
        top_p[random] = [s.sampling.top_p for s in chosen]
        min_p[random] = [s.sampling.min_p for s in chosen]
        seeds = [s.sampling.seed & 0xFFFFFFFFFFFFFFFF for s in chosen]
        drawn = uniforms(np.array(seeds, np.uint64), [s.next_output_index for s in chosen])
        numbers[random] = np.minimum(drawn.astype(np.float32), _BELOW_ONE)
    return {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "uniforms": numbers,
    }
