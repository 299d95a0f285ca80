"""Compiles and touches every kernel before the first request, and measures the first steps."""

from __future__ import annotations

import time

from engine.engine import Engine
from engine.sequence import Sequence
from mesh.messages import SamplingParams

_PROMPT_TOKENS = 40
"""Past the row count at which kernels switch from serial to parallel."""


def warm_up(engine: Engine) -> None:
    """Run a prompt and two decode steps through the engine, then forget it all but their pace."""
    length = min(_PROMPT_TOKENS, engine.max_sequence_tokens - 3)
    if length < 1:
        return
    _run_prompt(engine, length)
    if engine.group.size == 1:  # several ranks have done it before the first broadcast step
        engine.runner.prepare(engine.model)
    engine.pace.forget()  # it has measured the compiler
    _run_prompt(engine, length)
    engine.step_time_s = engine.tokens_per_s = 0.0


def _run_prompt(engine: Engine, length: int) -> None:
    now_s = time.monotonic()
    sequence = Sequence(
        request_id="warm-up",
        transfer_id="warm-up",
        token_ids=[0] * length,
        num_prompt_tokens=length,
        sampling=SamplingParams(max_tokens=3, temperature=0.0),
        deadline_s=now_s + 600.0,
        arrival_s=now_s,
        cache_salt="warm-up",
    )
    engine.scheduler.add(sequence)
    while sequence.finish_reason is None:
        engine.step()
    engine.scheduler.finish(sequence)
    while engine.scheduler.has_work:
        engine.step()
    engine.rest()
    engine.scheduler.pool.forget_cached()
