"""The largest step on the GPU's kernels, and an engine whose cache is sized by it."""

from __future__ import annotations

from engine.backends.gpu.backend import GpuBackend
from engine.backends.gpu.device import HostDevice
from engine.engine import Engine
from engine.gpu_memory.profile import GpuCacheSizer
from mesh.config import WorkerConfig
from tests.unit.engine.memory_meter import Meter
from tests.unit.engine.tiny_llama import TinyLlama, generate, new_sequence, random_prompt

_MIB = 1 << 20


def test_an_engine_computes_in_the_blocks_that_were_measured_to_fit(
    tiny_llama: TinyLlama,
) -> None:
    config = WorkerConfig(
        role="decode", worker_id="w", redis_url="redis://h", model=str(tiny_llama.folder),
        weights="fp32", max_model_len=48, max_num_seqs=3, max_batched_tokens=20,
    )  # fmt: skip
    meter = Meter(10 * _MIB, elsewhere=_MIB, before=2 * _MIB, at_most=3 * _MIB)
    sizer = GpuCacheSizer(config, meter)
    engine = Engine(config, GpuBackend("fp32", HostDevice()), sizer=sizer)
    assert meter.runs == 1
    assert engine.kv_spec.num_blocks == 5 * _MIB // engine.kv_spec.block_bytes
    prompt = random_prompt(17, seed=3)
    assert generate(engine, new_sequence(prompt, 2)) == [tiny_llama.greedy(prompt, 2)]
