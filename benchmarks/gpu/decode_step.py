"""A whole decode step of a random model: in one graph, launch by launch, and its kernels alone."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from engine.backend import KVCacheSpec, StepSizes
from engine.backends.gpu.backend import GpuBackend
from engine.backends.gpu.device import CudaDevice, Device
from engine.backends.gpu.linears import WeightScheme
from engine.backends.gpu.step_runner import GpuRunner
from engine.batch import BatchInputs, build_batch
from engine.model_config import LayerType, ModelConfig
from engine.models.decoder import Decoder
from engine.rope_config import RopeConfig
from engine.scheduling.step_plan import ScheduledChunk
from engine.sequence import Sequence
from engine.weights.expected_tensors import expected_tensors
from engine.weights.source import WeightSource
from mesh.messages import SamplingParams

HEADINGS = (
    "weights", "batch", "context", "graph ms", "launches ms", "kernels ms", "graph / kernels",
    "weights + KV ms", "target", "",
)  # fmt: skip
TARGET = 1.15
"""Most that a step may take, in sums of its kernels."""
_BLOCK_SIZE = 16


def shape_8b(num_layers: int = 32) -> ModelConfig:
    """Llama 3 8B's shape."""
    full: LayerType = "full_attention"
    return ModelConfig(
        architecture="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336,
        num_layers=num_layers, num_heads=32, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0), max_position_embeddings=131072,
        tie_word_embeddings=False, layer_types=(full,) * num_layers,
        query_scale=128**-0.5,
    )  # fmt: skip


class RandomSource(WeightSource):
    """Weights made where they are needed; no file."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._shapes = dict(expected_tensors(config))
        self._generator = torch.Generator(device).manual_seed(1)

    def names(self) -> list[str]:
        """See WeightSource."""
        return sorted(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """See WeightSource."""
        return self._shapes[name]

    def get(
        self, name: str, rows: slice = slice(None), columns: slice = slice(None)
    ) -> torch.Tensor:
        """See WeightSource: another draw every time."""
        shape = self._shapes[name]
        generator = self._generator
        values = torch.randn(shape, generator=generator, device=generator.device)
        values *= shape[-1] ** -0.5
        return values[rows, columns] if len(shape) > 1 else values[rows] + 1.0

    def content_hash(self) -> str:
        """See WeightSource."""
        return "random"

    def close(self) -> None:
        """See WeightSource."""


@dataclass(slots=True, frozen=True)
class StepTimes:
    """Of one decode step, in seconds."""

    graph_s: float
    launches_s: float
    kernels_s: float
    """Sum over the device's kernels; NaN where nothing could be measured."""


class DecodeStep:
    """Owns a model, a cache that all contexts share, and the steps."""

    def __init__(
        self, config: ModelConfig, weights: WeightScheme, device: Device, *, max_batch: int,
        max_context: int,
    ) -> None:  # fmt: skip
        self._device = device
        backend = GpuBackend(weights, device)
        source = RandomSource(config, device.torch_device)
        with torch.inference_mode():
            self.model = Decoder(config, source, backend, max_context)
        num_blocks = max_context // _BLOCK_SIZE
        self.spec = KVCacheSpec(
            num_blocks=max_batch * num_blocks, num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads, block_size=_BLOCK_SIZE, head_dim=config.head_dim,
            dtype=backend.default_kv_dtype,
        )  # fmt: skip
        backend.allocate_kv_cache(self.spec)
        self._blocks_each = num_blocks
        self._runner: GpuRunner = backend.step_runner(
            StepSizes(
                num_tokens=max_batch, num_sequences=max_batch, num_blocks=num_blocks,
                vocab_size=config.vocab_size,
            )
        )  # fmt: skip

    def capture(self) -> None:
        """Make the graphs; steps are launched kernel by kernel before."""
        self._runner.prepare(self.model)

    def seconds(self, batch: int, context: int, num_steps: int = 20) -> float:
        """Of a step, in a row of steps of which each is launched while the one before computes."""
        inputs, sequences = self._inputs(batch, context)
        self._run(inputs, sequences, 3)
        start_s = time.perf_counter()
        self._run(inputs, sequences, num_steps)
        return (time.perf_counter() - start_s) / num_steps

    def kernels_s(self, batch: int, context: int, num_steps: int = 5) -> float:
        """Sum of the times of a step's kernels."""
        if self._device.torch_device.type != "cuda":
            return float("nan")
        inputs, sequences = self._inputs(batch, context)
        self._run(inputs, sequences, 2)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self._run(inputs, sequences, num_steps)
        total_us = sum(event.self_device_time_total for event in profiler.key_averages())
        return float(total_us) / 1e6 / num_steps

    def _run(self, inputs: BatchInputs, sequences: SequenceOf[Sequence], num_steps: int) -> None:
        """As the engine does: one step ahead."""
        computing = None
        with torch.inference_mode():
            for _ in range(num_steps):
                launched = self._runner.launch(self.model, inputs, sequences, [])
                if computing is not None:
                    computing.finish()
                computing = launched
        if computing is not None:
            computing.finish()

    def _inputs(self, batch: int, context: int) -> tuple[BatchInputs, list[Sequence]]:
        chunks = []
        for row in range(batch):
            sequence = Sequence(
                request_id=str(row), transfer_id=str(row), token_ids=[1] * context,
                num_prompt_tokens=context, sampling=SamplingParams(max_tokens=1, temperature=1.0),
                deadline_s=float("inf"), arrival_s=0.0,
            )  # fmt: skip
            sequence.num_computed_tokens = context - 1
            first = row * self._blocks_each
            sequence.block_table = list(range(first, first + -(-context // _BLOCK_SIZE)))
            chunks.append(ScheduledChunk(sequence, 1))
        return build_batch(chunks, _BLOCK_SIZE), [chunk.sequence for chunk in chunks]


def measure(
    weights: WeightScheme, points: SequenceOf[tuple[int, int]], bytes_per_s: float,
    *, config: ModelConfig | None = None, device: Device | None = None,
) -> list[list[object]]:  # fmt: skip
    """Rows of the table for (batch, context) pairs."""
    step = DecodeStep(
        config or shape_8b(), weights, device or CudaDevice(),
        max_batch=max(batch for batch, _ in points),
        max_context=max(context for _, context in points),
    )  # fmt: skip
    launches = {point: step.seconds(*point) for point in points}
    kernels = {point: step.kernels_s(*point) for point in points}
    step.capture()
    rows: list[list[object]] = []
    for batch, context in points:
        graph_s = step.seconds(batch, context)
        kernels_s = kernels[batch, context]
        kv_bytes = batch * context * step.spec.block_bytes // _BLOCK_SIZE
        floor_s = (step.model.num_weight_bytes + kv_bytes) / bytes_per_s
        ratio = graph_s / kernels_s
        rows.append([
            weights, batch, context, graph_s * 1e3, launches[batch, context] * 1e3,
            kernels_s * 1e3, ratio, floor_s * 1e3, TARGET, "SLOW" if ratio > TARGET else "ok",
        ])  # fmt: skip
    return rows
