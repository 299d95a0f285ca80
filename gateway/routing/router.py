"""Chooses the prefill and decode worker of a request: a pure function over load views.

D is chosen by how full its KV pool and its batch will be, P by how long its prompt queue takes.
Both views are the last snapshot plus what this gateway has sent since, because a hundred requests
can arrive between two snapshots.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from mesh.errors import ContextTooLong, Overloaded, Unavailable
from mesh.worker_info import LoadSnapshot, WorkerInfo

MAX_WAITING_PER_SEQ = 8
"""A decode worker whose queue is this many times its batch takes no more."""

_ANY_TRANSPORT = "auto"
"""Such a worker agrees with its partner on a data plane when they meet."""

_DEFAULT_PREFILL_TOKENS_PER_S = 200.0
_WAITING_WEIGHT = 2.0
"""A queued sequence waits for a whole place in the batch, a running one only shares the step."""

_EMPTY_LOAD = LoadSnapshot(
    kv_blocks_total=0,
    kv_blocks_free=0,
    kv_blocks_quarantined=0,
    open_transfers=0,
    running=0,
    waiting=0,
    queued_tokens=0,
    step_time_s=0.0,
    tokens_per_s=0.0,
)


class Unseen(msgspec.Struct, frozen=True, kw_only=True):
    """What this gateway sent to a worker since the worker's last snapshot."""

    tokens: int = 0
    blocks: int = 0
    sequences: int = 0


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One worker whose link is up."""

    info: WorkerInfo
    load: LoadSnapshot | None = None
    unseen: Unseen = Unseen()


class Need(NamedTuple):
    """What a request asks of its workers."""

    num_prompt_tokens: int
    num_total_tokens: int
    """Prompt plus the most output tokens it may make."""


class Pair(NamedTuple):
    """Ids of the chosen workers."""

    prefill_id: str
    decode_id: str


def choose(
    candidates: Sequence[Candidate],
    need: Need,
    avoid: Collection[str] = (),
    incompatible: Collection[Pair] = (),
) -> Pair:
    """Choose a pair with equal KV fingerprint and a data plane that both have.

    Args:
        candidates: All workers that serve the model, of both roles.
        need: The request's size.
        avoid: Workers that failed this request; taken only where nothing else is left.
        incompatible: Pairs that refused each other.

    Raises:
        Unavailable: no pair fits together.
        ContextTooLong: no decode worker's whole pool or context holds the request.
        Overloaded: every decode worker's queue is full.
    """
    serving = [c for c in candidates if c.load is None or not c.load.draining]
    prefills = [c for c in serving if c.info.role == "prefill"]
    decodes = _partners([c for c in serving if c.info.role == "decode"], prefills, incompatible)
    if not decodes:
        raise Unavailable("no matching pair of a prefill and a decode worker is up")
    prefills = [c for c in prefills if need.num_prompt_tokens <= max_tokens(c.info)]
    fitting = [c for c in decodes if need.num_total_tokens <= max_tokens(c.info)]
    fitting = _partners(fitting, prefills, incompatible)
    if not fitting:
        longest = max(max_tokens(c.info) for c in decodes)
        raise ContextTooLong(
            f"a prompt of {need.num_prompt_tokens} and {need.num_total_tokens} tokens in all do "
            f"not fit any pair of workers (at most {longest})"
        )
    open_ = [c for c in fitting if not _is_full(c)]
    if not open_:
        raise Overloaded("every decode worker's queue is full")
    decode = min(open_, key=lambda c: (c.info.worker_id in avoid, _decode_cost(c, need)))
    partners = _partners(prefills, [decode], incompatible)
    prefill = min(partners, key=lambda c: (c.info.worker_id in avoid, _prefill_cost(c, need)))
    return Pair(prefill.info.worker_id, decode.info.worker_id)


def has_pair(candidates: Sequence[Candidate], incompatible: Collection[Pair] = ()) -> bool:
    """Whether any request could be served now."""
    serving = [c for c in candidates if c.load is None or not c.load.draining]
    prefills = [c for c in serving if c.info.role == "prefill"]
    decodes = [c for c in serving if c.info.role == "decode"]
    return bool(_partners(prefills, decodes, incompatible))


def _partners(
    candidates: Sequence[Candidate],
    others: Sequence[Candidate],
    incompatible: Collection[Pair] = (),
) -> list[Candidate]:
    """Those that can hand KV to, or take it from, one of ``others``."""
    if incompatible:  # rare: two workers that register alike and yet refuse each other
        return [
            candidate
            for candidate in candidates
            if any(
                _pair_of(candidate, other) not in incompatible and _partners([candidate], [other])
                for other in others
            )
        ]
    kinds: dict[str, set[str]] = {}
    for other in others:
        kinds.setdefault(other.info.fingerprint, set()).add(other.info.transport)
    return [c for c in candidates if _shares_one(c.info.transport, kinds.get(c.info.fingerprint))]


def _shares_one(transport: str, others: set[str] | None) -> bool:
    """Whether a worker of this data plane and one of the others can have one in common."""
    return others is not None and (
        transport in others or _ANY_TRANSPORT in others or transport == _ANY_TRANSPORT
    )


def _pair_of(one: Candidate, other: Candidate) -> Pair:
    prefill, decode = (one, other) if one.info.role == "prefill" else (other, one)
    return Pair(prefill.info.worker_id, decode.info.worker_id)


def max_tokens(info: WorkerInfo) -> int:
    """Longest sequence that a worker can hold."""
    return min(info.max_model_len, info.kv_blocks_total * info.block_size)


def _is_full(candidate: Candidate) -> bool:
    load = candidate.load or _EMPTY_LOAD
    waiting = load.waiting + candidate.unseen.sequences
    return waiting > MAX_WAITING_PER_SEQ * candidate.info.max_num_seqs


def _decode_cost(candidate: Candidate, need: Need) -> float:
    """KV occupancy with this request, plus how full the batch and its queue are; 0 is idle."""
    load, info = candidate.load, candidate.info
    free = load.kv_blocks_free if load is not None else info.kv_blocks_total
    total = max(1, info.kv_blocks_total)
    wanted = math.ceil(need.num_prompt_tokens / max(1, info.block_size)) + candidate.unseen.blocks
    load = load or _EMPTY_LOAD
    sequences = load.running + candidate.unseen.sequences + _WAITING_WEIGHT * load.waiting
    queued = (load.queued_tokens + candidate.unseen.tokens) / max(1, total * info.block_size)
    return (total - free + wanted) / total + sequences / max(1, info.max_num_seqs) + queued


def _prefill_cost(candidate: Candidate, need: Need) -> float:
    """Seconds until this prompt would be computed."""
    load = candidate.load or _EMPTY_LOAD
    speed = load.tokens_per_s or _DEFAULT_PREFILL_TOKENS_PER_S
    return (load.queued_tokens + candidate.unseen.tokens + need.num_prompt_tokens) / speed
