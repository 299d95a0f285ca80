"""The scheduler's decisions in situations small enough to follow."""

from __future__ import annotations

from typing import Any

import pytest

from engine.cache.block_pool import BlockPool
from engine.scheduling.scheduler import MAX_PASSED, Scheduler
from engine.scheduling.step_plan import StepPlan
from engine.sequence import Sequence, SequenceState
from mesh.errors import IllegalTransition
from tests.unit.engine.tiny_llama import new_sequence


def make_scheduler(num_blocks: int = 16, **limits: Any) -> Scheduler:
    defaults = {"block_size": 4, "max_num_seqs": 8, "max_batched_tokens": 8, "watermark": 0.0}
    return Scheduler(BlockPool(num_blocks), **{**defaults, **limits}, clock=lambda: 0.0)


def advance(scheduler: Scheduler) -> StepPlan:
    """One step whose every sampled token is 0; ended sequences leave."""
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


def test_decodes_come_first_and_prompts_take_what_is_left() -> None:
    scheduler = make_scheduler()
    long = new_sequence([1] * 20, arrival_s=0.0)
    short = new_sequence([2] * 3, arrival_s=1.0)
    scheduler.add(long)
    assert counts(advance(scheduler)) == {long: 8}
    scheduler.add(short)
    assert counts(advance(scheduler)) == {long: 8}
    assert counts(advance(scheduler)) == {long: 4, short: 3}
    late = new_sequence([3] * 20, arrival_s=2.0)
    scheduler.add(late)
    assert counts(advance(scheduler)) == {long: 1, short: 1, late: 6}


def test_the_youngest_yields_its_blocks_and_recomputes() -> None:
    scheduler = make_scheduler(num_blocks=4, max_batched_tokens=16)
    old = new_sequence([1] * 8, 5, arrival_s=0.0)
    young = new_sequence([2] * 8, 5, arrival_s=1.0)
    scheduler.add(old)
    scheduler.add(young)
    advance(scheduler)
    plan = advance(scheduler)
    assert counts(plan) == {old: 1}
    assert young.state is SequenceState.WAITING
    assert (young.num_preemptions, young.num_computed_tokens, young.block_table) == (1, 0, [])
    while scheduler.has_work:
        advance(scheduler)
    assert old.num_preemptions == 0
    assert len(young.token_ids) == len(old.token_ids) == 13


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    scheduler = make_scheduler(num_blocks=5, max_batched_tokens=16)
    old = new_sequence([1] * 8, 5, arrival_s=0.0)
    young = new_sequence([2] * 12, 4, arrival_s=1.0)
    scheduler.add(old)
    scheduler.add(young)
    advance(scheduler)
    advance(scheduler)
    while young.num_preemptions == 0:
        plan = advance(scheduler)
    while young.state is not SequenceState.RUNNING:
        plan = advance(scheduler)
    assert 0 < counts(plan)[young] < young.num_tokens
    assert young.num_cached_tokens == 0  # which clients are told of: nobody else's


def test_prefix_hits_and_computed_tokens_are_counted() -> None:
    scheduler = make_scheduler(max_batched_tokens=16)
    for round_number in range(2):
        sequence = new_sequence([1] * 10, 2, arrival_s=0.0)
        scheduler.add(sequence)
        advance(scheduler)
        assert scheduler.num_kv_tokens == 10
        advance(scheduler)
        assert scheduler.num_prefix_queries == 10 * (round_number + 1)
        assert scheduler.num_prefix_hits == 8 * round_number
    advance(scheduler)


def test_small_requests_pass_one_that_must_wait_for_blocks_but_not_for_ever() -> None:
    scheduler = make_scheduler(num_blocks=8)
    scheduler.add(new_sequence([1] * 16, 8, arrival_s=0.0), remote_prefill=True)
    (running,) = scheduler.schedule().reserved
    large = new_sequence([2] * 24, 1, arrival_s=1.0)
    small = [new_sequence([3] * 4, 1, arrival_s=2.0 + i) for i in range(MAX_PASSED + 1)]
    for sequence in (large, *small):
        scheduler.add(sequence, remote_prefill=True)
    passed: list[Sequence] = []
    for _ in range(MAX_PASSED + 2):
        reserved = scheduler.schedule().reserved
        passed += reserved
        for sequence in reserved:
            scheduler.finish(sequence)
    assert passed == small[:MAX_PASSED]
    scheduler.finish(running)
    assert scheduler.schedule().reserved[0] is large


@pytest.mark.parametrize(("num_preemptions", "num_blocks"), [(0, 3), (1, 5)])
def test_a_preempted_sequence_comes_back_when_all_that_runs_can_grow(
    num_preemptions: int, num_blocks: int
) -> None:
    for spare in (0, 1):
        scheduler = make_scheduler(num_blocks=num_blocks - 1 + spare)
        for arrival in range(2):
            scheduler.add(new_sequence([arrival] * 2, arrival_s=float(arrival)))
        advance(scheduler)
        late = new_sequence([2] * 2, arrival_s=2.0)
        late.num_preemptions = num_preemptions
        scheduler.add(late)
        assert (late in counts(advance(scheduler))) == bool(spare)


def test_kv_from_a_peer_needs_no_budget_but_a_place() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_batched_tokens=4)
    local = new_sequence([1] * 4, arrival_s=0.0)
    remote = new_sequence([2] * 9, arrival_s=1.0)
    third = new_sequence([3] * 4, arrival_s=2.0)
    scheduler.add(local)
    scheduler.add(remote, remote_prefill=True)
    scheduler.add(third, remote_prefill=True)
    plan = advance(scheduler)
    assert plan.reserved == [remote]
    assert counts(plan) == {local: 4}
    assert len(remote.block_table) == 3
    assert third.state is SequenceState.WAITING
    scheduler.kv_arrived(remote)
    remote.append(0)
    assert counts(advance(scheduler)) == {local: 1, remote: 1}


def test_a_sequence_whose_kv_came_from_a_peer_recomputes_here_after_preemption() -> None:
    scheduler = make_scheduler(num_blocks=4, max_batched_tokens=16)
    old = new_sequence([1] * 7, 9, arrival_s=0.0)
    remote = new_sequence([2] * 7, 9, arrival_s=1.0)
    for sequence in (old, remote):
        scheduler.add(sequence, remote_prefill=True)
    assert scheduler.schedule().reserved == [old, remote]
    for sequence in (old, remote):
        scheduler.kv_arrived(sequence)
        sequence.append(0)
    while remote.num_preemptions == 0:
        advance(scheduler)
    while scheduler.has_work:
        assert advance(scheduler).reserved == []
    assert len(remote.token_ids) == 16


def test_cached_blocks_are_not_granted_to_the_peer() -> None:
    scheduler = make_scheduler()
    first = new_sequence([1] * 9, 1)
    scheduler.add(first)
    while scheduler.has_work:
        advance(scheduler)
    second = new_sequence([1] * 9)
    scheduler.add(second, remote_prefill=True)
    advance(scheduler)
    assert second.num_cached_tokens == 8
    granted = scheduler.withdraw_granted(second)
    assert len(granted) == scheduler.pool.num_quarantined == 1
    assert scheduler.pool.num_free == 15
    scheduler.pool.release_quarantined(granted)
    assert scheduler.pool.num_free == 16


def test_the_watermark_keeps_room_for_what_runs_but_not_from_the_only_one() -> None:
    scheduler = make_scheduler(num_blocks=4, watermark=0.5, max_batched_tokens=64)
    first = new_sequence([1] * 12, 4, arrival_s=0.0)
    scheduler.add(first)
    assert counts(advance(scheduler)) == {first: 12}
    second = new_sequence([2] * 4, 4, arrival_s=1.0)
    scheduler.add(second)
    assert counts(advance(scheduler)) == {first: 1}
    while first.finish_reason is None:
        advance(scheduler)
    assert counts(advance(scheduler)) == {second: 4}


def test_only_what_waits_expires() -> None:
    now_s = 0.0
    scheduler = Scheduler(
        BlockPool(4), block_size=4, max_num_seqs=1, max_batched_tokens=8, clock=lambda: now_s
    )
    running, waiting = new_sequence([1], arrival_s=0.0), new_sequence([2], arrival_s=1.0)
    running.deadline_s = waiting.deadline_s = 5.0
    scheduler.add(running)
    scheduler.add(waiting)
    assert advance(scheduler).expired == []
    now_s = 5.0
    plan = advance(scheduler)
    assert plan.expired == [waiting]
    assert counts(plan) == {running: 1}
    assert scheduler.live_sequences() == [running]


def test_the_load_counts_tokens_still_to_compute() -> None:
    scheduler = make_scheduler()
    scheduler.add(new_sequence([1] * 20, arrival_s=0.0))
    scheduler.add(new_sequence([2] * 5, arrival_s=1.0))
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 2)
    assert scheduler.num_queued_tokens == 25
    advance(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert scheduler.num_queued_tokens == 11 + 5  # of 12 left, the last one is a step of its own


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (SequenceState.FINISHED, SequenceState.RUNNING),
        (SequenceState.SENDING, SequenceState.RUNNING),
        (SequenceState.WAITING_FOR_KV, SequenceState.WAITING),
        (SequenceState.WAITING, SequenceState.SENDING),
    ],
)
def test_a_transition_that_is_not_in_the_table_raises(
    before: SequenceState, after: SequenceState
) -> None:
    sequence = new_sequence([1])
    sequence.state = before
    with pytest.raises(IllegalTransition, match=f"{after.name} is not allowed in {before.name}"):
        sequence.move(after)


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ([1, 2], None),
        ([1, 9], "stop"),
        ([9], None),  # before min_tokens a stop token does not end the answer
        ([1, 2, 3, 4], "length"),
        ([1, 2, 3, 9], "stop"),
    ],
)
def test_an_answer_ends_at_a_stop_token_or_its_limit(
    outputs: list[int], reason: str | None
) -> None:
    sequence = new_sequence([0], 4, stop_token_ids=(9,), min_tokens=1)
    for token_id in outputs:
        sequence.append(token_id)
    assert sequence.finish_reason == reason
