"""The scheduler through random arrivals, aborts, transfers and time, on pools of a few blocks.

Whatever happens: no block leaks or has two owners, every step stays in its limits, nothing reads
KV that was not computed for it, a step with work and nothing to wait for computes something, and
everything that fits ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.cache.block_pool import BlockPool
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_plan import StepPlan
from engine.sequence import Sequence, SequenceState
from mesh.messages import SloClass
from tests.unit.engine.simulated_kv import SimulatedKV
from tests.unit.engine.tiny_llama import new_sequence

PICK = st.integers(min_value=0, max_value=1 << 16)
LONG_S = 1e9


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 8),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(1, 8),
        watermark=st.sampled_from([0.0, 0.3]),
        overlap=st.booleans(),
    )
    def create(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        watermark: float,
        overlap: bool,
    ) -> None:
        self.now_s = 0.0
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(
            self.pool,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=budget,
            batch_chunk_tokens=max(1, budget // 2),
            watermark=watermark,
            clock=lambda: self.now_s,
        )
        self.kv = SimulatedKV(block_size)
        self.overlap = overlap
        self.computing: deque[tuple[StepPlan, Callable[[], None]]] = deque()
        self.live: list[Sequence] = []
        self.prefill_only: set[Sequence] = set()
        self.quarantined: list[list[int]] = []

    # ------------------------------------------------------------------ what workers do

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        max_tokens=st.integers(1, 8),
        kind=st.sampled_from(["local", "local", "remote", "prefill only", "nobody takes it"]),
        salt=st.sampled_from(["", "", "salted"]),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        slo_class=st.sampled_from(["interactive", "batch"]),
        patience_s=st.sampled_from([LONG_S, LONG_S, 3.0]),
    )
    def arrive(
        self, prompt: list[int], max_tokens: int, kind: str, salt: str, priority: int,
        slo_class: SloClass, patience_s: float,
    ) -> None:  # fmt: skip
        prefill_only = kind in ("prefill only", "nobody takes it")
        needed = len(prompt) if prefill_only else len(prompt) + max_tokens
        if needed > self.scheduler.max_tokens_per_sequence():
            return  # refused at admission
        sequence = new_sequence(prompt, max_tokens, arrival_s=self.now_s, cache_salt=salt)
        sequence.priority = priority
        sequence.slo_class = slo_class
        sequence.has_receiver = kind != "nobody takes it"
        sequence.deadline_s = self.now_s + patience_s
        self.scheduler.add(sequence, remote_prefill=kind == "remote")
        self.live.append(sequence)
        if prefill_only:
            self.prefill_only.add(sequence)

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0]))
    def step(self, seconds: float = 1.0) -> None:
        self.now_s += seconds
        is_computing = bool(self.computing)
        if not is_computing or self.scheduler.can_run_ahead():
            self.launch()
        waits = is_computing or not self.overlap or not self.scheduler.can_run_ahead()
        if self.computing and waits:
            self.collect()

    def launch(self) -> None:
        """Plan a step; a late device computes it only when it must."""
        decoding = {
            s
            for s in self.live
            if s.state is SequenceState.RUNNING
            and s.num_uncomputed_tokens == 1
            and not (s.num_pending_tokens and s.next_output_index >= s.sampling.max_tokens)
        }
        plan = self.scheduler.schedule()
        self.check_plan(plan, decoding)
        for sequence in plan.expired:
            assert sequence.deadline_s <= self.now_s
            assert sequence.state is SequenceState.FINISHED
            self.live.remove(sequence)
        if plan.shed is not None:
            assert plan.shed.state is SequenceState.SENDING
            assert not plan.shed.has_receiver
            plan.shed.has_receiver = True  # its worker gives it up; its transfer ends later
        if plan.chunks:
            self.computing.append((plan, self.kv.launch(plan)))
            self.scheduler.launch(plan)
        self.check_census()

    def collect(self) -> None:
        """The oldest launched step is done."""
        plan, compute = self.computing.popleft()
        sampled = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        compute()
        self.scheduler.step_done(plan)
        for sequence in sampled:
            if not sequence.is_answering:
                continue
            sequence.append(len(sequence.token_ids) % 2)
            if sequence in self.prefill_only:
                self.scheduler.hold_for_sending(sequence)
            elif sequence.finish_reason is not None:
                self.end(sequence)
        self.check_census()

    @rule(pick=PICK)
    def kv_arrives(self, pick: int) -> None:
        for sequence in self.picked(pick, SequenceState.WAITING_FOR_KV):
            for position in range(sequence.num_cached_tokens, sequence.num_tokens):
                self.kv.write(sequence, position)
            self.scheduler.kv_arrived(sequence)
            sequence.append(len(sequence.token_ids) % 2)
            if sequence.finish_reason is not None:
                self.end(sequence)
            self.check_census()

    @rule(pick=PICK)
    def transfer_fails(self, pick: int) -> None:
        for sequence in self.picked(pick, SequenceState.WAITING_FOR_KV):
            granted = self.scheduler.withdraw_granted(sequence)
            assert granted, "at least the last block is always granted"
            self.quarantined.append(granted)
            self.live.remove(sequence)
            self.check_census()

    @precondition(lambda self: self.quarantined)
    @rule(pick=PICK)
    def late_write_lands(self, pick: int) -> None:
        self.kv.spoil(self.quarantined[pick % len(self.quarantined)])

    @precondition(lambda self: self.quarantined)
    @rule(pick=PICK)
    def quarantine_ends(self, pick: int) -> None:
        self.pool.release_quarantined(self.quarantined.pop(pick % len(self.quarantined)))
        self.check_census()

    @rule(pick=PICK)
    def is_granted(self, pick: int) -> None:
        idle = [sequence for sequence in self.live if not sequence.has_receiver]
        if idle:
            idle[pick % len(idle)].has_receiver = True

    @rule(pick=PICK)
    def sending_ends(self, pick: int) -> None:
        for sequence in self.picked(pick, SequenceState.SENDING):
            if not any(sequence in (c.sequence for c in plan.chunks) for plan, _ in self.computing):
                self.kv.check(sequence, sequence.num_computed_tokens)
            self.end(sequence)

    @rule(pick=PICK, state=st.sampled_from([SequenceState.WAITING, SequenceState.RUNNING]))
    def abort(self, pick: int, state: SequenceState) -> None:
        for sequence in self.picked(pick, state):
            self.end(sequence)

    @rule(pick=PICK)
    def abort_while_sending_chunks(self, pick: int) -> None:
        for sequence in self.picked(pick, SequenceState.RUNNING):
            if sequence in self.prefill_only:
                self.scheduler.hold_for_sending(sequence)

    # ------------------------------------------------------------------ what must hold

    def picked(self, pick: int, state: SequenceState) -> list[Sequence]:
        """One live sequence in the state, if there is any."""
        matching = [sequence for sequence in self.live if sequence.state is state]
        return [matching[pick % len(matching)]] if matching else []

    def end(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.live.remove(sequence)
        self.check_census()

    def check_plan(self, plan: StepPlan, decoding: set[Sequence]) -> None:
        scheduler = self.scheduler
        planned = [chunk.sequence for chunk in plan.chunks]
        assert len(set(planned)) == len(planned)
        assert plan.num_tokens <= scheduler.max_batched_tokens
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert sequence.state is SequenceState.RUNNING
            assert 1 <= chunk.num_scheduled_tokens <= sequence.num_uncomputed_tokens
            end = sequence.num_computed_tokens + chunk.num_scheduled_tokens
            assert len(sequence.block_table) * scheduler.block_size >= end
        states = [sequence.state for sequence in self.live]
        assert (
            states.count(SequenceState.RUNNING) + states.count(SequenceState.WAITING_FOR_KV)
            <= scheduler.max_num_seqs
        )
        left_out = {s for s in decoding - set(planned) if s.state is SequenceState.RUNNING}
        if left_out:
            assert set(planned) <= decoding, "a prompt chunk displaced a decode"
            assert plan.num_tokens == scheduler.max_batched_tokens
        blocked_by_others = self.quarantined or any(
            not sequence.has_receiver
            or sequence.state in (SequenceState.SENDING, SequenceState.WAITING_FOR_KV)
            for sequence in self.live
        )
        if scheduler.has_work and not blocked_by_others and not self.computing:
            assert plan.chunks, "nothing to wait for, and nothing was computed"

    def check_census(self) -> None:
        self.pool.check_integrity()
        owned = [block for s in self.live for block in set(s.block_table)]
        owned += self.scheduler.launched.retired
        withheld = [block for blocks in self.quarantined for block in blocks]
        assert not set(owned) & set(withheld)
        assert len(set(withheld)) == len(withheld) == self.pool.num_quarantined
        in_use = len(set(owned)) + len(withheld)
        assert self.pool.num_free == self.pool.num_blocks - in_use
        assert set(self.scheduler.live_sequences()) == set(self.live)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        remaining = sum(s.num_tokens + s.sampling.max_tokens for s in self.live)
        for _ in range((len(self.live) + 1) * (remaining + 1)):
            if not self.live and not self.computing:
                break
            self.step()
            for _ in range(len(self.live)):
                self.is_granted(0)
                self.kv_arrives(0)
                self.sending_ends(0)
            while self.quarantined:
                self.quarantine_ends(0)
        assert not self.live, "sequences that fit did not end"
        while self.quarantined:
            self.quarantine_ends(0)
        assert self.pool.num_free == self.pool.num_blocks


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
