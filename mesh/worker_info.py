"""What a worker says of itself: who it is, once, and how loaded, ten times a second."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

MAX_RANKS = 64
"""Of one worker's tensor-parallel group."""

Role = Literal["prefill", "decode"]


class WorkerGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that a worker computes on."""

    uuid: str
    name: str
    memory_bytes: int
    link_gb_s: tuple[int, ...]
    """NVLink to each of the worker's GPUs in their order, GB/s each way; 0: none."""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker registers: constant for one epoch."""

    worker_id: str
    role: Role
    epoch: int
    endpoint: str
    """Control ROUTER, ``tcp://host:port``."""
    http_endpoint: str
    """``http://host:port`` with /metrics and /health."""
    fingerprint: str
    model: str
    """Served model name."""
    max_model_len: int
    block_size: int
    """Token slots per KV block."""
    kv_blocks_total: int
    max_num_seqs: int
    transport: str
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    gpus: tuple[WorkerGpu, ...] = ()
    """In the order of its ranks."""
    tensor_parallel: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    """As in PeerRef."""
    cpu_level: str = ""
    """Vector instructions of its kernels, where a CPU computes."""


class LoadSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's load and census; sent to Redis every ~100 ms and on StatusRequest."""

    kv_blocks_total: int
    kv_blocks_free: int
    """Includes cached blocks that can be evicted now."""
    kv_blocks_quarantined: int
    open_transfers: int
    running: int
    """Sequences that are computing or decoding."""
    waiting: int
    """Sequences that wait for blocks, budget or KV."""
    queued_tokens: int
    """Prompt tokens not yet computed, over all sequences."""
    step_time_s: float
    """EWMA of one engine step."""
    tokens_per_s: float
    """EWMA of computed tokens per second of step time (prefill speed on P)."""
    draining: bool = False
