"""A prefill pool cannot be filled by KV that no decode worker takes."""

from __future__ import annotations

from collections.abc import Callable

from engine.cache.block_pool import BlockPool
from engine.scheduling.scheduler import SHED_AFTER_S, Scheduler
from engine.scheduling.step_plan import StepPlan
from engine.sequence import Sequence
from mesh.messages import SamplingParams

BLOCK_SIZE = 4


def _scheduler(num_blocks: int, clock: Callable[[], float] = lambda: 0.0) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks),
        block_size=BLOCK_SIZE,
        max_num_seqs=16,
        max_batched_tokens=64,
        watermark=0.0,
        clock=clock,
    )


def _sequence(name: str, num_blocks: int, *, arrival_s: float, granted: bool) -> Sequence:
    return Sequence(
        request_id=name,
        transfer_id=name,
        token_ids=[ord(name[0])] * (num_blocks * BLOCK_SIZE),
        num_prompt_tokens=num_blocks * BLOCK_SIZE,
        sampling=SamplingParams(max_tokens=8),
        deadline_s=1e9,
        arrival_s=arrival_s,
        has_receiver=granted,
    )


def _compute(scheduler: Scheduler) -> StepPlan:
    """One step; whoever sampled is held for sending, as on a prefill worker."""
    plan = scheduler.schedule()
    done = [chunk.sequence for chunk in plan.chunks if chunk.samples]
    scheduler.launch(plan)
    scheduler.step_done(plan)
    for sequence in done:
        sequence.append(0)
        scheduler.hold_for_sending(sequence)
    return plan


def test_sequences_without_receiver_share_half_the_pool() -> None:
    scheduler = _scheduler(8)
    for index in range(4):
        scheduler.add(_sequence(f"{index}", 2, arrival_s=index, granted=False))
    _compute(scheduler)
    assert scheduler.pool.num_free == 4
    assert scheduler.num_waiting == 2


def test_granted_sequence_passes_those_that_may_not_hold_blocks() -> None:
    scheduler = _scheduler(8)
    for index in range(3):
        scheduler.add(_sequence(f"{index}", 2, arrival_s=index, granted=False))
    late = _sequence("late", 4, arrival_s=9, granted=True)
    scheduler.add(late)
    _compute(scheduler)
    assert late.num_computed_tokens == 4 * BLOCK_SIZE


def test_waiting_sequence_is_computed_once_it_is_granted() -> None:
    scheduler = _scheduler(8)
    large = _sequence("large", 6, arrival_s=0, granted=False)
    scheduler.add(large)
    assert not _compute(scheduler).chunks
    large.has_receiver = True
    assert [chunk.sequence for chunk in _compute(scheduler).chunks] == [large]


def test_least_urgent_held_sequence_yields_to_a_granted_one() -> None:
    now_s = [0.0]
    scheduler = _scheduler(8, clock=lambda: now_s[0])
    held = [_sequence(name, 2, arrival_s=at, granted=False) for at, name in enumerate("ab")]
    for sequence in held:
        scheduler.add(sequence)
    _compute(scheduler)
    large = _sequence("large", 6, arrival_s=5, granted=True)
    scheduler.add(large)
    now_s[0] = 5 + SHED_AFTER_S
    assert _compute(scheduler).shed is None
    now_s[0] += 0.1
    assert _compute(scheduler).shed is held[1]
    assert _compute(scheduler).shed is None  # one at a time: its blocks are on their way
    scheduler.finish(held[1])
    plan = _compute(scheduler)
    assert plan.shed is None
    assert [chunk.sequence for chunk in plan.chunks] == [large]


def test_prompts_for_a_congested_link_wait_and_let_others_pass() -> None:
    scheduler = _scheduler(8)
    congested = _sequence("congested", 2, arrival_s=0, granted=True)
    congested.is_backpressured = True
    other = _sequence("other", 2, arrival_s=9, granted=True)
    scheduler.add(congested)
    scheduler.add(other)
    assert [chunk.sequence for chunk in _compute(scheduler).chunks] == [other]
    congested.is_backpressured = False
    assert [chunk.sequence for chunk in _compute(scheduler).chunks] == [congested]
