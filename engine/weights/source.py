"""The interface behind which every file format hides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

import torch


class WeightSource(ABC):
    """Named float32 tensors of an opened model.

    Names are those of Hugging Face checkpoints (``model.layers.0.self_attn.q_proj.weight``); a
    matrix is ``[out_features, in_features]``; the rows of q and k are in Hugging Face's rotary
    order (pairs ``(i, i + head_dim / 2)``); norm weights are as Hugging Face stores them. Each
    expert of a mixture is a matrix of its own
    (``model.layers.0.mlp.experts.3.gate_proj.weight``).

    Opening reads headers alone. The source holds open files and must be closed (it is a context
    manager); tensors handed out stay valid.
    """

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it; KeyError if there is no such tensor."""

    @abstractmethod
    def get(
        self, name: str, rows: slice = slice(None), columns: slice = slice(None)
    ) -> torch.Tensor:
        """Read one tensor, or a part of it, as float32.

        Rows that are not asked for are not read from the file.

        Args:
            name: One of ``names()``; another is a KeyError.
            rows: Of the first dimension, without a step; whole heads of q and k.
            columns: Of the second dimension, likewise; a vector has none.

        Returns:
            A contiguous tensor that shares no memory with the file or with another call's.

        Raises:
            ConfigError: The file changed or cannot be read.
        """

    @abstractmethod
    def content_hash(self) -> str:
        """Identify the weights: equal for equal files wherever they lie; see ``file_digest``."""

    def bits_per_weight(self) -> float:
        """How many bits the file spends on an element of the layers' matrices, on average."""
        return 16.0

    @abstractmethod
    def close(self) -> None:
        """Close the files; may be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
