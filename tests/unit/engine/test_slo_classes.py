"""Interactive work is served first and in small steps; batch work is never left behind."""

from __future__ import annotations

from typing import Any

import pytest

from engine.cache.block_pool import BlockPool
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_budget import LEAST_PROMPT_TOKENS
from engine.scheduling.step_pace import StepPace
from engine.scheduling.step_plan import StepPlan
from engine.sequence import Sequence, SequenceState
from mesh.messages import SloClass
from tests.unit.engine.tiny_llama import new_sequence

PATIENCE_S = 60.0


def make_scheduler(num_blocks: int = 64, **limits: Any) -> Scheduler:
    defaults = {
        "block_size": 4,
        "max_num_seqs": 8,
        "max_batched_tokens": 32,
        "batch_chunk_tokens": 8,
        "watermark": 0.0,
    }
    return Scheduler(BlockPool(num_blocks), **{**defaults, **limits}, clock=lambda: 0.0)


def arrive(
    scheduler: Scheduler, slo_class: SloClass, num_tokens: int, arrival_s: float,
    max_tokens: int = 50, *, priority: int = 0,
) -> Sequence:  # fmt: skip
    sequence = new_sequence([1] * num_tokens, max_tokens, arrival_s=arrival_s)
    sequence.slo_class = slo_class
    sequence.priority = priority
    sequence.cache_salt = sequence.transfer_id  # nothing is shared
    scheduler.add(sequence)
    return sequence


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    sampled = [chunk.sequence for chunk in plan.chunks if chunk.samples]
    scheduler.launch(plan)
    scheduler.step_done(plan)
    for sequence in sampled:
        sequence.append(0)
        if sequence.finish_reason is not None:
            scheduler.finish(sequence)
    return plan


def counts(plan: StepPlan) -> dict[Sequence, int]:
    return {chunk.sequence: chunk.num_scheduled_tokens for chunk in plan.chunks}


def admitted(scheduler: Scheduler) -> list[Sequence]:
    """In which order sequences were admitted where there is room for one at a time."""
    order: list[Sequence] = []
    for _ in range(500):
        if not scheduler.has_work:
            return order
        order += [c.sequence for c in step(scheduler).chunks if c.sequence not in order]
    raise AssertionError("sequences did not end")


def test_interactive_work_is_admitted_before_batch_work_that_came_earlier() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    batch = arrive(scheduler, "batch", 4, 0.0, 2)
    interactive = arrive(scheduler, "interactive", 4, PATIENCE_S - 1.0, 2)
    assert admitted(scheduler) == [interactive, batch]


def test_batch_work_passes_interactive_work_once_its_patience_is_over() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    newer = arrive(scheduler, "interactive", 4, PATIENCE_S + 1.0, 2)
    batch = arrive(scheduler, "batch", 4, 0.0, 2)
    older = arrive(scheduler, "interactive", 4, PATIENCE_S - 1.0, 2)
    assert admitted(scheduler) == [older, batch, newer]


def test_a_stream_of_interactive_work_cannot_starve_batch_work() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    batch = arrive(scheduler, "batch", 4, 0.0, 2)
    for second in range(200):
        arrive(scheduler, "interactive", 4, float(second), 1)
        step(scheduler)
        if batch.state is SequenceState.RUNNING:
            assert second >= PATIENCE_S
            return
    raise AssertionError("the batch request never ran")


def test_a_lower_priority_number_comes_before_any_class() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    interactive = arrive(scheduler, "interactive", 4, 0.0, 2)
    batch = arrive(scheduler, "batch", 4, 5.0, 2, priority=-1)
    assert admitted(scheduler) == [batch, interactive]


def test_of_one_class_and_moment_the_shorter_prompt_comes_first() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    long = arrive(scheduler, "interactive", 40, 0.0, 2)
    short = arrive(scheduler, "interactive", 8, 0.0, 2)
    assert admitted(scheduler) == [short, long]


def test_batch_work_yields_its_blocks_first() -> None:
    scheduler = make_scheduler(num_blocks=6)
    batch = arrive(scheduler, "batch", 8, 0.0, 16)
    interactive = arrive(scheduler, "interactive", 8, 10.0, 16)
    for _ in range(12):
        step(scheduler)
    assert (batch.num_preemptions > 0, interactive.num_preemptions) == (True, 0)


def test_batch_prompts_share_a_small_chunk_while_interactive_work_is_live() -> None:
    scheduler = make_scheduler()
    interactive = arrive(scheduler, "interactive", 3, 0.0, 4)
    first = arrive(scheduler, "batch", 50, 1.0)
    second = arrive(scheduler, "batch", 50, 2.0)
    assert counts(step(scheduler)) == {interactive: 3, first: 5}
    for _ in range(3):
        assert counts(step(scheduler)) == {interactive: 1, first: 7}
    assert interactive.state is SequenceState.FINISHED
    assert counts(step(scheduler)) == {first: 24, second: 8}
    assert step(scheduler).num_tokens == 32


def test_interactive_prompts_take_the_whole_budget() -> None:
    scheduler = make_scheduler()
    batch = arrive(scheduler, "batch", 4, 0.0)
    step(scheduler)
    interactive = arrive(scheduler, "interactive", 60, 1.0)
    assert counts(step(scheduler)) == {batch: 1, interactive: 31}


@pytest.mark.parametrize("num_decoding", [7, 8, 20])
def test_decodes_leave_batch_prompts_something_of_every_step(num_decoding: int) -> None:
    scheduler = make_scheduler(num_blocks=512, max_num_seqs=24)
    for _ in range(num_decoding):
        arrive(scheduler, "interactive", 1, 0.0, 60)
    step(scheduler)
    batch = [arrive(scheduler, "batch", 12, 1.0, 1) for _ in range(3)]
    for _ in range(50):
        assert step(scheduler).num_tokens <= max(num_decoding + 2, 8)
    assert all(sequence.state is SequenceState.FINISHED for sequence in batch)


def slow_pace(num_tokens: int) -> StepPace:
    """Of a worker that computes just ``num_tokens`` in time."""
    pace = StepPace(1.0, 32)
    pace.observe(100, 100 / (num_tokens + 0.5))
    assert pace.limit_tokens() == num_tokens
    return pace


def test_prompts_take_what_is_computed_in_time_beside_decodes() -> None:
    scheduler = make_scheduler(pace=slow_pace(20))
    first = arrive(scheduler, "interactive", 50, 0.0)
    assert counts(step(scheduler)) == {first: 20}
    assert counts(step(scheduler)) == {first: 20}
    second = arrive(scheduler, "interactive", 50, 1.0)
    assert counts(step(scheduler)) == {first: 10, second: 10}
    assert counts(step(scheduler)) == {first: 1, second: 19}


def test_on_the_slowest_worker_prompts_still_go_on_beside_decodes() -> None:
    scheduler = make_scheduler(pace=slow_pace(1))
    decoding = [arrive(scheduler, "interactive", 1, 0.0) for _ in range(6)]
    step(scheduler)
    prompt = arrive(scheduler, "interactive", 50, 1.0)
    assert counts(step(scheduler)) == {**dict.fromkeys(decoding, 1), prompt: LEAST_PROMPT_TOKENS}


def test_batch_prompts_share_small_steps_on_a_slow_worker_too() -> None:
    scheduler = make_scheduler(pace=slow_pace(20))
    decoding = [arrive(scheduler, "interactive", 1, 0.0) for _ in range(3)]
    step(scheduler)
    batch = arrive(scheduler, "batch", 50, 1.0)
    assert counts(step(scheduler)) == {**dict.fromkeys(decoding, 1), batch: 5}
