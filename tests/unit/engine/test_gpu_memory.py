"""The arithmetic of a GPU's memory: what fits, and what a refusal says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.gpu_memory.fit import Alternative, GpuMemory, KVDemand, Share, fit_kv_blocks, kv_bytes
from mesh.errors import ConfigError

_GIB = 1 << 30
_MIB = 1 << 20
H100 = GpuMemory(total=80 * _GIB, outside=1 * _GIB, weights=16 * _GIB, activations=2 * _GIB)
LLAMA_8B = KVDemand(block_bytes=2 * _MIB, block_size=16, max_model_len=131_072)
"""fp16: 128 KiB a token; one sequence of that length is 16 GiB."""


def refusal(memory: GpuMemory, demand: KVDemand, share: Share, **more: object) -> str:
    with pytest.raises(ConfigError) as caught:
        fit_kv_blocks(memory, demand, share, **more)  # type: ignore[arg-type]
    return str(caught.value)


def test_what_is_left_is_counted_in_whole_blocks() -> None:
    assert kv_bytes(H100, Share(0.9)) == (72 - 16 - 2 - 1) * _GIB
    assert fit_kv_blocks(H100, LLAMA_8B, Share(0.9)) == 53 * 512
    odd = replace(H100, weights=H100.weights + 1)
    assert fit_kv_blocks(odd, LLAMA_8B, Share(0.9)) == 53 * 512 - 1


def test_staging_comes_off_the_pool() -> None:
    demand = replace(LLAMA_8B, num_staging_blocks=64)
    assert fit_kv_blocks(H100, demand, Share(0.9)) == 53 * 512 - 64


def test_workers_that_share_have_equal_parts_in_any_order() -> None:
    half = Share(0.9, num_workers=2)
    alone = replace(H100, outside=0)
    assert kv_bytes(alone, half) == (36 - 16 - 2) * _GIB
    # The other one is there already, with its whole part and CUDA's memory in it.
    assert kv_bytes(replace(H100, outside=36 * _GIB), half) == (36 - 16 - 2) * _GIB
    # A stranger has taken more than the other's part: that is missing.
    assert kv_bytes(replace(H100, outside=40 * _GIB), half) == (36 - 16 - 2 - 4) * _GIB


def test_a_number_of_blocks_is_kept_where_it_fits() -> None:
    assert fit_kv_blocks(H100, LLAMA_8B, Share(0.9), num_blocks=100) == 100
    text = refusal(H100, LLAMA_8B, Share(0.9), num_blocks=30_000)
    assert text.startswith("kv_blocks: 0.9 x 80.00 GiB of the GPU = 72.00 GiB, ")
    assert text.endswith("Any of these helps: --kv-blocks 27136, --gpu-memory-utilization 0.97")


def test_a_model_that_does_not_fit_shows_the_whole_sum() -> None:
    memory = replace(H100, weights=141 * _GIB, activations=0)
    int8 = Alternative("--weights int8", 71 * _GIB, LLAMA_8B.block_bytes)
    int4 = Alternative("--weights int4", 37 * _GIB, LLAMA_8B.block_bytes)
    text = refusal(memory, LLAMA_8B, Share(0.9), alternatives=[int8, int4])
    assert text == (
        "gpu_memory_utilization: 0.9 x 80.00 GiB of the GPU = 72.00 GiB, less weights 141.00 GiB, "
        "activations not measured yet, outside this worker 1.00 GiB: -70.00 GiB for KV, and one "
        "sequence of 131072 tokens needs 16.00 GiB (8192 blocks of 2048 KiB). "
        "Any of these helps: --weights int4"
    )


def test_a_sequence_that_does_not_fit_says_which_would() -> None:
    memory = replace(H100, weights=60 * _GIB)
    text = refusal(memory, LLAMA_8B, Share(0.9))
    assert "9.00 GiB for KV" in text
    assert "--max-model-len 73728" in text
    assert "--gpu-memory-utilization" not in text, "it would have to be 0.99"
    assert fit_kv_blocks(memory, replace(LLAMA_8B, max_model_len=73_728), Share(0.9)) == 4608


def test_a_shared_gpu_may_be_too_small_for_two() -> None:
    text = refusal(replace(H100, outside=30 * _GIB), LLAMA_8B, Share(0.8, num_workers=2))
    assert "0.8 x 80.00 GiB of the GPU / 2 workers = 32.00 GiB" in text
    assert "outside this worker 30.00 GiB (up to 32.00 GiB of it their part)" in text
    assert text.endswith("--max-model-len 114688, --gpu-memory-utilization 0.85, --gpu-slots 1")


def test_no_remedy_is_said_to_be_none() -> None:
    memory = replace(H100, weights=200 * _GIB)
    assert refusal(memory, LLAMA_8B, Share(0.9)).endswith("more GPUs or a smaller model")


_BYTES = st.integers(0, 100 * _GIB)


@given(
    memory=st.builds(
        GpuMemory,
        total=st.integers(8 * _GIB, 192 * _GIB), outside=_BYTES, weights=_BYTES, activations=_BYTES,
    ),
    demand=st.builds(
        KVDemand,
        block_bytes=st.integers(1024, 8 * _MIB), block_size=st.sampled_from([16, 32]),
        max_model_len=st.integers(1, 1 << 18), num_staging_blocks=st.sampled_from([0, 64]),
    ),
    share=st.builds(Share, utilization=st.floats(0.05, 1.0), num_workers=st.integers(1, 4)),
    num_blocks=st.sampled_from([0, 0, 1000]),
)  # fmt: skip
def test_what_fits_fits_and_what_is_proposed_would(
    memory: GpuMemory, demand: KVDemand, share: Share, num_blocks: int
) -> None:
    try:
        blocks = fit_kv_blocks(memory, demand, share, num_blocks=num_blocks)
    except ConfigError as error:
        text = str(error)
    else:
        staged = blocks + demand.num_staging_blocks
        assert staged * demand.block_bytes <= kv_bytes(memory, share)
        assert num_blocks or (staged + 1) * demand.block_bytes > kv_bytes(memory, share)
        return
    for flag, value in re.findall(r"--([a-z-]+) ([\d.]+)", text):
        changed, part, wanted = demand, share, num_blocks
        if flag == "max-model-len":
            changed, wanted = replace(demand, max_model_len=int(value)), 0
        elif flag == "kv-blocks":
            wanted = int(value)
        elif flag == "gpu-memory-utilization":
            part = replace(share, utilization=float(value))
        else:
            assert flag == "gpu-slots"
            part = replace(share, num_workers=1)
        assert fit_kv_blocks(memory, changed, part, num_blocks=wanted) > 0
