"""What one step's kernels read: the batch on the device, and how attention divides it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.backend import StepSizes
from engine.backends.gpu.device import Device
from engine.backends.gpu.kernels.sampling.take_tokens import take_tokens
from engine.backends.gpu.staging import Staging, section_bytes
from engine.batch import BatchInputs

_TABLE_STEP = 16
"""Widths of block tables are multiples of it: kernels are compiled for such strides."""


@dataclass(slots=True, frozen=True)
class GpuStep:
    """Implements ``StepInputs``. T tokens, B sequences, N sampled rows; all on the device."""

    token_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int32."""
    slot_mapping: torch.Tensor
    """[T] int64; -1: a padding row."""
    context_lens: torch.Tensor
    """[B] int32; 0: a padding row."""
    block_tables: torch.Tensor
    """[B, width] int32."""
    sample_rows: torch.Tensor
    """[N] int64."""
    num_decodes: int
    """Leading sequences with one token each; they are ``token_ids[:num_decodes]``."""
    query_starts: torch.Tensor
    """[B - num_decodes + 1] int32, first rows of the other chunks, counted from the first one."""
    max_query_len: int


class StepInputBuffers:
    """Owns what every step of an engine is staged in, and the tokens that the last one drew."""

    def __init__(self, device: Device, sizes: StepSizes) -> None:
        num_sequences = sizes.num_sequences
        self.width = -(-sizes.num_blocks // _TABLE_STEP) * _TABLE_STEP
        """Of block tables in captured graphs."""
        num_bytes = (
            2 * section_bytes(sizes.num_tokens, np.int64)
            + section_bytes(num_sequences, np.int64)
            + 2 * section_bytes(sizes.num_tokens, np.int32)
            + 2 * section_bytes(num_sequences + 1, np.int32)
            + section_bytes(num_sequences * self.width, np.int32)
        )
        self._staging = Staging(device, num_bytes)
        self.drawn = torch.zeros(num_sequences, dtype=torch.int32, device=device.torch_device)
        """[most sequences] of the last launched step, by sampled row."""
        self._tables = torch.zeros(
            num_sequences, self.width, dtype=torch.int32, device=device.torch_device
        )

    def begin(self, batch: BatchInputs) -> GpuStep:
        """Stage any batch and fill in its pending tokens."""
        views = self._staging.stage(_sections(batch))
        take_tokens(views["token_ids"], views["token_sources"], self.drawn)
        counts = np.diff(batch.query_starts)
        return GpuStep(
            token_ids=views["token_ids"],
            positions=views["positions"],
            slot_mapping=views["slot_mapping"],
            context_lens=views["context_lens"],
            block_tables=views["block_tables"],
            sample_rows=views["sample_rows"],
            num_decodes=_num_decodes(batch),
            query_starts=views["query_starts"],
            max_query_len=int(counts.max()),
        )

    def stage_decodes(self, batch: BatchInputs, num_rows: int) -> dict[str, torch.Tensor]:
        """Stage a batch of decodes alone, padded to ``num_rows``, where its graph reads it."""
        padding = num_rows - batch.num_tokens
        assert padding >= 0
        views = self._staging.stage(
            {
                "slot_mapping": np.pad(batch.slot_mapping, (0, padding), constant_values=-1),
                "token_ids": np.pad(batch.token_ids, (0, padding)),
                "token_sources": np.pad(batch.token_sources, (0, padding), constant_values=-1),
                "positions": np.pad(batch.positions, (0, padding)),
                "context_lens": np.pad(batch.context_lens, (0, padding)),
                "block_tables": _widened(batch.block_tables),
            }
        )
        tables = views["block_tables"]
        self._tables[: tables.shape[0], : tables.shape[1]].copy_(tables)
        return views

    def decode_step(self, num_rows: int) -> tuple[GpuStep, torch.Tensor]:
        """The step that a graph of ``num_rows`` decodes reads, and its tokens' sources.

        It holds padding rows until ``stage_decodes`` fills it.
        """
        views = self.stage_decodes(_no_decodes(), num_rows)
        rows = torch.arange(num_rows, device=self.drawn.device)
        step = GpuStep(
            token_ids=views["token_ids"],
            positions=views["positions"],
            slot_mapping=views["slot_mapping"],
            context_lens=views["context_lens"],
            block_tables=self._tables[:num_rows],
            sample_rows=rows,
            num_decodes=num_rows,
            query_starts=rows[:0],
            max_query_len=1,
        )
        return step, views["token_sources"]


def is_pure_decode(batch: BatchInputs) -> bool:
    """Whether every sequence has one token, and its logits are wanted."""
    return batch.num_tokens == len(batch.context_lens) == len(batch.sample_rows)


def _num_decodes(batch: BatchInputs) -> int:
    """Leading sequences that have one token."""
    others = np.flatnonzero(np.diff(batch.query_starts) != 1)
    return int(others[0]) if len(others) else len(batch.context_lens)


def _sections(batch: BatchInputs) -> dict[str, npt.NDArray[np.generic]]:
    num_decodes = _num_decodes(batch)
    return {
        "slot_mapping": batch.slot_mapping,
        "token_ids": batch.token_ids,
        "sample_rows": batch.sample_rows,
        "token_sources": batch.token_sources,
        "positions": batch.positions,
        "query_starts": batch.query_starts[num_decodes:] - np.int32(num_decodes),
        "context_lens": batch.context_lens,
        "block_tables": _widened(batch.block_tables),
    }


def _widened(tables: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return np.pad(tables, ((0, 0), (0, -tables.shape[1] % _TABLE_STEP)))


def _no_decodes() -> BatchInputs:
    integers = np.empty(0, np.int32)
    wide = np.empty(0, np.int64)
    return BatchInputs(
        token_ids=wide, token_sources=integers, positions=integers, slot_mapping=wide,
        query_starts=np.zeros(1, np.int32), context_lens=integers,
        block_tables=np.empty((0, 0), np.int32), sample_rows=wide,
    )  # fmt: skip
