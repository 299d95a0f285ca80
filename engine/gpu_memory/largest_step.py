"""The step that needs the most memory beside weights and KV: run once, to measure it."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from engine.backend import KVCacheSpec, StepSizes
from engine.batch import build_batch
from engine.cache.block_pool import BlockPool
from engine.models.decoder import Decoder
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Sequence
from mesh.messages import SamplingParams


@torch.inference_mode()
def run_largest_step(
    model: Decoder,
    spec: KVCacheSpec,
    *,
    max_num_seqs: int,
    max_batched_tokens: int,
    max_model_len: int,
) -> torch.Tensor:
    """Compute as many tokens and logits as a step ever does; of several ranks all have to.

    All KV goes to one block, so that the cache needs no room here; what is computed means nothing.
    The backend's cache is left a block large: allocate the real one afterwards, and make a runner.

    Args:
        model: with its backend.
        spec: the cache's geometry; the number of blocks does not matter.
        max_num_seqs: most sequences in one step.
        max_batched_tokens: most tokens in one step.
        max_model_len: tokens of the longest sequence, for which a runner has room.

    Returns:
        The logits, [number of sequences, V].
    """
    num_sequences = min(max_num_seqs, max_batched_tokens)
    num_tokens = min(max_batched_tokens, num_sequences * max_model_len)
    lengths = [
        num_tokens // num_sequences + (i < num_tokens % num_sequences) for i in range(num_sequences)
    ]
    blocks_each = lengths[0] // spec.block_size + 1
    scheduler = Scheduler(
        BlockPool(2 * num_sequences * blocks_each),
        block_size=spec.block_size,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        prefix_caching=False,
    )
    now_s = time.monotonic()
    for i, length in enumerate(lengths):
        sequence = Sequence(
            request_id=f"largest-{i}",
            transfer_id=f"largest-{i}",
            token_ids=[0] * length,
            num_prompt_tokens=length,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            deadline_s=now_s + 600.0,
            arrival_s=now_s,
        )
        scheduler.add(sequence)
    chunks = scheduler.schedule().chunks
    for chunk in chunks:
        chunk.sequence.block_table[:] = [0] * len(chunk.sequence.block_table)
    backend = model.backend
    backend.allocate_kv_cache(replace(spec, num_blocks=1))
    runner = backend.step_runner(
        StepSizes(
            num_tokens=max_batched_tokens,
            num_sequences=num_sequences,
            num_blocks=-(-max_model_len // spec.block_size),
            vocab_size=model.config.vocab_size,
        )
    )
    logits = model.forward(build_batch(chunks, spec.block_size))
    del runner  # until here its buffers take the room that they will take
    return logits
