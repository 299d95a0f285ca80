"""Decode steps as one launch each: captured once per batch size, padded up to the next size.

    sizes     1   2   4   8        16       24       32  …  most sequences
    batch 19  ─────────────────────────────▶ replayed with 5 padding rows

A padding row writes no KV, sees no keys and draws a token that nobody reads. A graph begins with
the pending tokens and ends with the drawn ones, so that nothing of a step waits for the host.

Every rank of several has the same graphs, captured in the same order: each runs its part of the
model, rank 0 draws, and all end with its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from engine.backend import StepSizes
from engine.backends.gpu.device import Device
from engine.backends.gpu.kernels.sampling.take_tokens import take_tokens
from engine.backends.gpu.sampling import Sampler
from engine.backends.gpu.step import StepInputBuffers
from engine.models.decoder import Decoder
from engine.tensor_parallel.group import TensorParallelGroup

_SMALL_SIZES = (1, 2, 4)
_SIZE_STEP = 8


class DecodeGraphs:
    """Owns the graphs of one model; none before ``capture``."""

    def __init__(
        self, device: Device, inputs: StepInputBuffers, sampler: Sampler, sizes: StepSizes,
        group: TensorParallelGroup,
    ) -> None:  # fmt: skip
        self._device = device
        self._inputs = inputs
        self._sampler = sampler
        self._group = group
        self._most = sizes
        self._sizes = graph_sizes(sizes.num_sequences)
        self._graphs: dict[tuple[int, bool], Callable[[], None]] = {}
        self.logits = torch.empty(0)
        """[most sequences, V] of the graph that was replayed last, by row; rank 0's alone."""

    def capture(self, model: Decoder) -> None:
        """Capture every size, the largest first: smaller ones then fit into its memory."""
        most_rows = self._most.num_sequences if self._group.rank == 0 else 0
        self.logits = torch.empty(
            most_rows, self._most.vocab_size,
            dtype=model.backend.activation_dtype, device=self._device.torch_device,
        )  # fmt: skip
        for num_rows in reversed(self._sizes):
            for is_cut in (False, True):
                self._graphs[num_rows, is_cut] = self._capture_size(model, num_rows, is_cut)

    def find_size(self, num_rows: int) -> int:
        """The least number of rows that is captured and holds so many; 0: there is none."""
        size = next((size for size in self._sizes if size >= num_rows), 0)
        return size if (size, False) in self._graphs else 0

    def replay(self, num_rows: int, *, is_cut: bool) -> None:
        """Launch the graph of exactly so many rows; ``is_cut``: some have a top_k or top_p."""
        self._graphs[num_rows, is_cut]()

    def _capture_size(self, model: Decoder, num_rows: int, is_cut: bool) -> Callable[[], None]:
        step, sources = self._inputs.decode_step(num_rows)
        rows = replace(self._sampler.stage([], num_rows), is_cut=is_cut)
        drawn, logits = self._inputs.drawn, self.logits[:num_rows]

        def run() -> None:
            take_tokens(step.token_ids, sources, drawn)
            computed = model.compute(step)
            if self._group.rank == 0:
                logits.copy_(computed)
                self._sampler.draw(logits, rows, drawn[:num_rows])
            self._group.broadcast(drawn)

        with torch.inference_mode():
            return self._device.capture(run)


def graph_sizes(num_rows: int) -> list[int]:
    """1, 2, 4, then multiples of 8, and the largest itself."""
    sizes = {*_SMALL_SIZES, *range(_SIZE_STEP, num_rows, _SIZE_STEP), num_rows}
    return sorted(size for size in sizes if size <= num_rows)
