"""The engine without servers around it, for benchmarks that time its steps."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.table import machine
from mesh.config import Weights, WorkerConfig
from mesh.messages import SamplingParams
from mesh.threads import configure_threads

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.sequence import Sequence

_DEADLINE_S = 3600.0
BLOCK_SIZE = 16


def engine_machine() -> str:
    """``machine()``, with the level of vector instructions that an engine's kernels have here."""
    configure_threads()
    from engine.device import cpu_level  # as below

    return f"{machine()}, kernels for {cpu_level('cpu')}"


def make_engine(
    *, model: str, weights: Weights, threads: int, max_num_seqs: int = 128, kv_blocks: int = 0
) -> Engine:
    """A warm engine, configured as a worker of `pdmesh up` would be.

    Raises:
        ConfigError: the model is unusable.
    """
    configure_threads()
    from worker.start import build_engine  # loads torch, which reads the thread settings

    config = WorkerConfig(
        role="decode", worker_id="bench", redis_url="redis://127.0.0.1:1",
        model=model, weights=weights, threads=threads, max_num_seqs=max_num_seqs,
        kv_blocks=kv_blocks, block_size=BLOCK_SIZE,
    )  # fmt: skip
    config.validate()
    return build_engine(config)


def add_sequence(
    engine: Engine, name: str, prompt: list[int], num_output: int, *, grammar: str = ""
) -> Sequence:
    """Queue a greedy request of exactly ``num_output`` tokens; remove it with ``finish``.

    Args:
        engine: where to.
        name: unique in it.
        prompt: token ids.
        num_output: tokens; a ``grammar`` must not end before.
        grammar: what the output follows, see ``mesh.model_text.grammar``.
    """
    from engine.sequence import Sequence

    now_s = time.monotonic()
    sequence = Sequence(
        request_id=name,
        transfer_id=name,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(max_tokens=num_output, temperature=0.0, grammar=grammar),
        deadline_s=now_s + _DEADLINE_S,
        arrival_s=now_s,
    )
    engine.grammars.attach(sequence)
    engine.scheduler.add(sequence)
    return sequence


def finish_ended(engine: Engine, sequences: set[Sequence]) -> None:
    """Take the sequences that have their last token out of the engine and out of the set."""
    for sequence in [s for s in sequences if s.finish_reason is not None]:
        engine.scheduler.finish(sequence)
        sequences.remove(sequence)
