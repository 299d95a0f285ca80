"""Weight matrices in the GPU's stored forms."""

from __future__ import annotations

from typing import Literal

import torch

from engine.backend import Embedding, Linear
from engine.backends.gpu.kernels.linear.int4_matmul import int4_matmul
from engine.backends.gpu.kernels.linear.int4_matmul import quantise as quantise_int4
from engine.backends.gpu.kernels.linear.int8_matmul import int8_matmul
from engine.backends.gpu.kernels.linear.int8_matmul import quantise as quantise_int8
from engine.backends.gpu.kernels.linear.int8_matmul_dynamic import int8_matmul_dynamic
from engine.backends.gpu.kernels.linear.packed_matmul import SplitWorkspace
from engine.backends.gpu.kernels.linear.packed_weights import pack

WeightScheme = Literal["fp32", "bf16", "fp16", "int8", "w8a8", "int4"]

_INT4_GROUPS = (128, 64, 32)
"""Inputs that share a scale: the most that divide a matrix's width."""


class DenseLinear:
    """Implements ``Linear`` in the activation dtype, by cuBLAS."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Keep [out, in] and [out], both of the activation dtype."""
        self.weight = weight
        self._bias = bias
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self._bias)


class PackedLinear:
    """Implements ``Linear`` with weights of few bits and activations as they are.

    8 bits have a scale per output (W8A16), 4 bits one per group of inputs (W4A16).
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, bits: int, workspace: SplitWorkspace
    ) -> None:
        """Quantise [out, in] float32; for 4 bits ``in`` is whole groups of 32."""
        if bits == 4:
            group = next(group for group in _INT4_GROUPS if weight.shape[1] % group == 0)
            values, self._scales = quantise_int4(weight, group)
        else:
            values, self._scales = quantise_int8(weight)
        self._product = int4_matmul if bits == 4 else int8_matmul
        self._words = pack(values, bits)
        self._bias = bias
        self._workspace = workspace
        self._num_outputs = weight.shape[0]
        self.num_bytes = self._words.nbytes + self._scales.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self._num_outputs)
        return self._product(
            x, self._words, self._scales, self._bias, out=out, workspace=self._workspace
        )


class DynamicInt8Linear:
    """Implements ``Linear`` with 8-bit weights and activations, scaled per output and per token."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Quantise [out, in] float32."""
        values, self._scales = quantise_int8(weight)
        self._words = pack(values, 8)
        self._bias = bias
        self._num_outputs = weight.shape[0]
        self.num_bytes = self._words.nbytes + self._scales.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self._num_outputs)
        return int8_matmul_dynamic(x, self._words, self._scales, self._bias, out=out)


class DenseEmbedding:
    """Implements ``Embedding`` in the activation dtype."""

    def __init__(self, table: torch.Tensor, *, shared: bool) -> None:
        """Keep [V, H]; ``shared``: an output head has the same memory."""
        self._table = table
        self.num_bytes = 0 if shared else table.nbytes

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(token_ids, self._table)


class LinearMaker:
    """Takes float32 weights over into one scheme's stored form on one device."""

    def __init__(
        self, scheme: WeightScheme, activation_dtype: torch.dtype, device: torch.device
    ) -> None:
        self._scheme = scheme
        self._dtype = activation_dtype
        self._device = device
        self._workspace = SplitWorkspace.allocate(device) if scheme in ("int8", "int4") else None

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A layer's matrix: [out, in] and [out] float32, anywhere.

        A matrix too narrow for groups of 32 inputs is stored in 8 bits where 4 are asked for.
        """
        scheme = self._scheme
        if scheme == "int4" and weight.shape[1] % _INT4_GROUPS[-1]:
            scheme = "int8"
        if bias is not None:
            bias = bias.to(self._device, self._dtype)
        match scheme:
            case "int8" | "int4":
                assert self._workspace is not None
                bits = 4 if scheme == "int4" else 8
                return PackedLinear(weight.to(self._device), bias, bits, self._workspace)
            case "w8a8":
                return DynamicInt8Linear(weight.to(self._device), bias)
            case _:
                return DenseLinear(weight.to(self._device, self._dtype), bias)

    def embedding_and_head(
        self, embedding: torch.Tensor, head: torch.Tensor | None
    ) -> tuple[Embedding, Linear]:
        """[V, H] float32 tables; one that both use is stored once.

        They stay in the activation dtype in all schemes but the weight-only ones, whose head has 8
        bits: the logits' precision matters most, and the head is read whole at every step.
        """
        table = embedding.to(self._device, self._dtype)
        if self._workspace is not None:
            weight = embedding if head is None else head
            quantised = PackedLinear(weight.to(self._device), None, 8, self._workspace)
            return DenseEmbedding(table, shared=False), quantised
        if head is None:
            return DenseEmbedding(table, shared=True), DenseLinear(table, None)
        dense = DenseLinear(head.to(self._device, self._dtype), None)
        return DenseEmbedding(table, shared=False), dense
