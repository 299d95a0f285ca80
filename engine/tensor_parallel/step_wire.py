"""A step's batch as bytes, from rank 0 to the ranks that follow it.

    u32 T | u32 B | u32 W | u32 N | u32 G | token_ids | positions | slot_mapping | … | sample_rows

The arrays follow as they lie in memory, in the order of ``BatchInputs``: both ends are processes of
one machine. T tokens, B sequences, block tables W wide, N sampled rows,
G rows of the graph that all ranks replay (0: none).
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.batch import BatchInputs

MAX_STEP_BYTES = 1 << 30
SEND_TIMEOUT_S = 60.0
"""A rank that has not taken a step by then is lost."""

_COUNTS = struct.Struct("<5I")
_FIELDS = (
    ("token_ids", np.int64),
    ("token_sources", np.int32),
    ("positions", np.int32),
    ("slot_mapping", np.int64),
    ("query_starts", np.int32),
    ("context_lens", np.int32),
    ("block_tables", np.int32),
    ("sample_rows", np.int64),
)


def _shapes(tokens: int, seqs: int, width: int, samples: int) -> tuple[tuple[int, ...], ...]:
    return *[(tokens,)] * 4, (seqs + 1,), (seqs,), (seqs, width), (samples,)


@dataclass(slots=True, frozen=True)
class AnnouncedStep:
    """What a follower is to compute next."""

    batch: BatchInputs
    graph_rows: int
    """See ``StepRunner.graph_rows``."""


class StepSender:
    """Sends every batch to every follower. For the model thread; closed with the process."""

    def __init__(self, ends: Sequence[socket.socket]) -> None:
        self._ends = ends
        for end in ends:
            end.settimeout(SEND_TIMEOUT_S)

    def __call__(self, batch: BatchInputs, graph_rows: int) -> None:
        """Send.

        Raises:
            OSError: a follower is gone, or takes nothing.
        """
        seqs, width = batch.block_tables.shape
        counts = _COUNTS.pack(batch.num_tokens, seqs, width, len(batch.sample_rows), graph_rows)
        arrays = [np.ascontiguousarray(getattr(batch, name), kind) for name, kind in _FIELDS]
        data = b"".join((counts, *(array.tobytes() for array in arrays)))
        for end in self._ends:
            end.sendall(data)


class StepReceiver:
    """A follower's end. For the model thread."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def next(self, timeout_s: float | None) -> AnnouncedStep | None:
        """The next step; None where none has begun to come within ``timeout_s``.

        Raises:
            EOFError: rank 0 is gone.
            ValueError: it sends nonsense.
        """
        self._end.settimeout(timeout_s)
        try:
            first = self._end.recv(_COUNTS.size)
        except (TimeoutError, BlockingIOError):
            return None
        if not first:
            raise EOFError("rank 0 is gone")
        self._end.settimeout(None)
        head = bytearray(_COUNTS.size)
        head[: len(first)] = first
        self._fill(memoryview(head)[len(first) :])
        *sizes, graph_rows = _COUNTS.unpack(head)
        shapes = _shapes(*sizes)
        kinds = [np.dtype(kind) for _, kind in _FIELDS]
        num_bytes = sum(
            math.prod(shape) * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)
        )
        if num_bytes > MAX_STEP_BYTES:
            raise ValueError(f"a step of {num_bytes} bytes")
        arrays: list[npt.NDArray[Any]] = [
            np.empty(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)
        ]
        for array in arrays:
            if array.nbytes:
                self._fill(memoryview(array.data).cast("B"))
        fields = dict(zip((name for name, _ in _FIELDS), arrays, strict=True))
        return AnnouncedStep(BatchInputs(**fields), graph_rows)

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            got = self._end.recv_into(view[done:])
            if not got:
                raise EOFError("rank 0 is gone")
            done += got
