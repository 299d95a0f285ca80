"""Decides what each step computes. Continuous batching: sequences join and leave at every step.

One rule covers prefill, decode and recompute: a running sequence has ``num_uncomputed_tokens`` to
compute; decoding ones have exactly one. Decodes are scheduled first, so a long prompt never stalls
them; prompt chunks take what is left of the step's budget. The scheduler never touches tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from engine.cache.block_pool import BlockPool
from engine.cache.prefix_cache import PrefixCache
from engine.scheduling.launched_steps import LaunchedSteps
from engine.scheduling.step_budget import StepBudget
from engine.scheduling.step_pace import StepPace
from engine.scheduling.step_plan import ScheduledChunk, StepPlan
from engine.sequence import Sequence, SequenceState

MAX_PASSED = 16
"""How many less urgent sequences may take blocks that are too few for a more urgent one, before
all blocks that become free are kept for it. Else a long prompt at the head leaves them unused."""

SHED_AFTER_S = 5.0
"""How long a granted prompt waits for blocks before one that nobody takes must give its up."""


class Scheduler:
    """Owns every live sequence of a worker and the pool's blocks that they hold."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_num_seqs: int,
        max_batched_tokens: int,
        batch_chunk_tokens: int = 128,
        prefix_caching: bool = True,
        watermark: float = 0.01,
        prefill_only: bool = False,
        pace: StepPace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With ``prefill_only``, sequences leave at their first token (a prefill worker's do).

        ``pace`` bounds what prompts add to a step; None: only ``max_batched_tokens`` does.
        """
        self.pool = pool
        self.block_size = block_size
        # With more, decodes alone could fill every step, and prompts would never be computed.
        self.max_num_seqs = min(max_num_seqs, max_batched_tokens)
        self.max_batched_tokens = max_batched_tokens
        self.prefix_cache = PrefixCache(pool, block_size, enabled=prefix_caching)
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        """Tokens of all admitted sequences, looked up in the prefix cache."""
        self.num_prefix_hits = 0
        """Those of them that were found."""
        self.num_kv_tokens = 0
        """Tokens of live sequences whose KV was in the pool after the last step."""
        self.launched = LaunchedSteps(pool)
        """Plans that compute. Their sequences may be finished, but not preempted."""
        self._prefill_only = prefill_only
        self._watermark_blocks = int(watermark * pool.num_blocks)
        self._clock = clock
        self._budget = StepBudget(max_batched_tokens, batch_chunk_tokens, pace)
        self._waiting: list[Sequence] = []
        self._waiting_for_kv: dict[str, Sequence] = {}
        self._running: list[Sequence] = []
        self._sending: dict[str, Sequence] = {}
        self._shed: Sequence | None = None

    # ------------------------------------------------------------------ arrivals and departures

    def max_tokens_per_sequence(self) -> int:
        """Tokens that one sequence can hold when it has the pool to itself."""
        return self.pool.num_blocks * self.block_size

    def add(self, sequence: Sequence, *, remote_prefill: bool = False) -> None:
        """Queue a sequence; with ``remote_prefill`` it waits for KV once blocks are reserved."""
        assert sequence.state is SequenceState.WAITING
        sequence.is_remote = remote_prefill
        self._waiting.append(sequence)

    def kv_arrived(self, sequence: Sequence) -> None:
        """All prompt KV of a WAITING_FOR_KV sequence is in its blocks; it may run."""
        del self._waiting_for_kv[sequence.transfer_id]
        sequence.num_computed_tokens = sequence.num_tokens
        self.prefix_cache.publish(sequence, sequence.num_tokens)
        sequence.move(SequenceState.RUNNING)
        self._running.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Remove a live sequence and free its blocks (they stay cached until evicted)."""
        self._remove(sequence)
        self._free_blocks(sequence)

    def withdraw_granted(self, sequence: Sequence) -> list[int]:
        """Remove a WAITING_FOR_KV sequence whose blocks a peer may still write into.

        Returns:
            The granted blocks, now in quarantine; the caller releases them through
            ``pool.release_quarantined``. Blocks that came from the prefix cache were never granted
            and are freed at once.
        """
        assert sequence.state is SequenceState.WAITING_FOR_KV
        self._remove(sequence)
        first_granted = sequence.num_cached_tokens // self.block_size
        granted = sequence.block_table[first_granted:]
        del sequence.block_table[first_granted:]
        self.pool.quarantine(granted)
        self._free_blocks(sequence)
        return granted

    def hold_for_sending(self, sequence: Sequence) -> None:
        """Stop computing but keep the blocks, which are being transferred; ``finish`` ends it."""
        self._running.remove(sequence)
        sequence.move(SequenceState.SENDING)
        self._sending[sequence.transfer_id] = sequence

    # ------------------------------------------------------------------ load

    @property
    def num_running(self) -> int:
        """Sequences computing or decoding."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences waiting for budget, blocks or KV."""
        return len(self._waiting) + len(self._waiting_for_kv)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens not computed yet."""
        waiting = sum(sequence.num_uncomputed_tokens for sequence in self._waiting)
        return waiting + sum(sequence.num_uncomputed_tokens - 1 for sequence in self._running)

    @property
    def has_work(self) -> bool:
        """Whether a step could find something to do."""
        return bool(self._running or self._waiting or self.launched.num_steps)

    def live_sequences(self) -> list[Sequence]:
        """Every sequence that holds or waits for something."""
        return [
            *self._waiting,
            *self._waiting_for_kv.values(),
            *self._running,
            *self._sending.values(),
        ]

    # ------------------------------------------------------------------ one step

    def schedule(self) -> StepPlan:
        """Plan the next step; allocates the blocks it needs, preempting when they run out."""
        plan = StepPlan()
        self._expire(plan)
        live = (*self._running, *self._waiting)
        self._budget.begin(keep_small=any(s.slo_class == "interactive" for s in live))
        self._schedule_running(plan)
        self._admit_waiting(plan)
        return plan

    def can_run_ahead(self) -> bool:
        """Whether the next step can be planned before the launched one is done.

        It can't where blocks run out: who is preempted loses what is being computed.
        """
        missing = 0
        for sequence in self._running:
            if not self._is_leaving(sequence):
                num_tokens = sequence.num_tokens + sequence.num_pending_tokens
                missing += max(0, self._blocks_for(num_tokens) - len(sequence.block_table))
        return missing <= self.pool.num_free

    def launch(self, plan: StepPlan) -> None:
        """The plan begins to compute: go on from where it will end. ``step_done`` must follow."""
        row = 0
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_computed_tokens += chunk.num_scheduled_tokens
            if chunk.samples:
                sequence.num_pending_tokens += 1
                sequence.pending_row = row
                row += 1
        self.launched.add(plan)

    def step_done(self, plan: StepPlan, *, late: Collection[Sequence] = ()) -> None:
        """The oldest launched plan is computed (call before appending sampled tokens).

        Args:
            plan: what was computed.
            late: sequences that could not be sampled; their last token is computed once more.
        """
        self.launched.done(plan)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_pending_tokens -= chunk.samples
            if sequence in late:
                sequence.num_computed_tokens -= 1
                chunk.num_scheduled_tokens -= 1
                chunk.samples = False
            if sequence.is_answering:
                self.prefix_cache.publish(sequence, chunk.end)
        holders = (*self._running, *self._sending.values())
        self.num_kv_tokens = sum(sequence.num_computed_tokens for sequence in holders)

    def _add_chunk(self, plan: StepPlan, sequence: Sequence, count: int) -> None:
        self._budget.take(sequence, count)
        plan.chunks.append(ScheduledChunk(sequence, count))

    def _schedule_running(self, plan: StepPlan) -> None:
        self._running.sort(key=_by_urgency)
        decoding = [s for s in self._running if s.num_uncomputed_tokens == 1]
        prefilling = [s for s in self._running if s.num_uncomputed_tokens > 1]
        self._schedule_each(plan, decoding)
        self._budget.begin_prompts()
        self._schedule_each(plan, prefilling)

    def _schedule_each(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if self._budget.num_left == 0:
                break
            if sequence.state is not SequenceState.RUNNING or sequence.awaits_grammar:
                continue  # preempted for a more urgent one in this very step, or not ready
            if self._is_leaving(sequence):
                continue
            count = sequence.num_uncomputed_tokens
            if count > 1:
                count = min(count, self._budget.chunk_limit(sequence))
            if count == 0:
                continue
            if self._grow(sequence, sequence.num_computed_tokens + count, plan):
                self._add_chunk(plan, sequence, count)

    def _is_leaving(self, sequence: Sequence) -> bool:
        """Whether the pending token is known to be its last one here."""
        ends = self._prefill_only or sequence.next_output_index >= sequence.sampling.max_tokens
        return sequence.num_pending_tokens > 0 and ends

    def _admit_waiting(self, plan: StepPlan) -> None:
        self._waiting.sort(key=_by_urgency)
        may_hold = self._blocks_left_without_receiver()
        blocked: list[Sequence] = []
        for sequence in list(self._waiting):
            if sequence.is_backpressured:
                continue
            takes_none = sequence.is_remote or sequence.awaits_grammar
            limit = 0 if takes_none else self._budget.chunk_limit(sequence)
            if not sequence.is_remote and limit == 0:
                continue
            if not sequence.has_receiver and self._blocks_for(sequence.num_tokens) > may_hold:
                continue
            active = len(self._running) + len(self._waiting_for_kv)
            if active >= self.max_num_seqs:
                break
            if not self._reserve(sequence):
                if self._clock() - sequence.arrival_s > SHED_AFTER_S and sequence.has_receiver:
                    plan.shed = plan.shed or self._shed_one()
                blocked.append(sequence)
                if sequence.num_passed >= MAX_PASSED:
                    break
                continue
            for passed in blocked:
                passed.num_passed += 1
            if not sequence.has_receiver:
                may_hold -= len(sequence.block_table)
            self._waiting.remove(sequence)
            if sequence.is_remote:
                sequence.is_remote = False  # preempted, it computes what came
                sequence.move(SequenceState.WAITING_FOR_KV)
                self._waiting_for_kv[sequence.transfer_id] = sequence
                plan.reserved.append(sequence)
            else:
                sequence.move(SequenceState.RUNNING)
                self._running.append(sequence)
                self._add_chunk(plan, sequence, min(sequence.num_uncomputed_tokens, limit))

    def _blocks_left_without_receiver(self) -> int:
        """Blocks that sequences without receiver may still take: at most half the pool in all.

        Decode workers grant by their own order. If sequences that nobody takes yet could fill this
        pool, those that have been granted room could not be computed, and that room would never
        become free: both pools would wait for each other.
        """
        live = (*self._running, *self._sending.values())
        held = sum(len(sequence.block_table) for sequence in live if not sequence.has_receiver)
        return self.pool.num_blocks // 2 - held

    def _shed_one(self) -> Sequence | None:
        """Choose a held sequence to give up, one at a time: its blocks come back only later."""
        if self._shed is not None and self._shed.state is SequenceState.SENDING:
            return None
        held = [sequence for sequence in self._sending.values() if not sequence.has_receiver]
        self._shed = max(held, key=_by_urgency, default=None)
        return self._shed

    def _reserve(self, sequence: Sequence) -> bool:
        """Give a waiting sequence blocks for all its tokens, cached ones first."""
        cached = self.prefix_cache.match(sequence)
        wanted = self._blocks_for(sequence.num_tokens) - len(cached)
        available = self.pool.num_free - self.pool.num_free_among(cached)
        if wanted + self._headroom(sequence) > available:
            return False
        self.pool.acquire(cached)
        sequence.block_table = cached + self.pool.allocate(wanted)
        sequence.num_computed_tokens = len(cached) * self.block_size
        sequence.num_registered_blocks = len(cached)
        if not sequence.num_preemptions:  # later it finds its own
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.num_prefix_queries += sequence.num_tokens
            self.num_prefix_hits += sequence.num_cached_tokens
        return True

    def _headroom(self, sequence: Sequence) -> int:
        """Blocks to leave free for what runs already, so that it is not preempted at once.

        A sequence that was preempted before comes back only when everything running can grow by a
        block: its recomputation would otherwise be thrown away again.
        """
        if not (self._running or self._waiting_for_kv or self._sending):
            return 0
        growing = len(self._running) if sequence.num_preemptions else 0
        return max(self._watermark_blocks, growing)

    def _grow(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Extend the block table to hold ``num_tokens``; may preempt others, or this one."""
        missing = self._blocks_for(num_tokens) - len(sequence.block_table)
        while missing > self.pool.num_free:
            victim = max(self._running, key=_by_urgency)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        if missing > 0:
            sequence.block_table += self.pool.allocate(missing)
        return True

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        """Take all blocks of a running sequence; it recomputes later with the same tokens."""
        assert not victim.num_pending_tokens, "run ahead without blocks"
        self._running.remove(victim)
        plan.chunks = [chunk for chunk in plan.chunks if chunk.sequence is not victim]
        self._free_blocks(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        victim.move(SequenceState.WAITING)
        self._waiting.append(victim)

    def _remove(self, sequence: Sequence) -> None:
        match sequence.state:
            case SequenceState.WAITING:
                self._waiting.remove(sequence)
            case SequenceState.WAITING_FOR_KV:
                del self._waiting_for_kv[sequence.transfer_id]
            case SequenceState.RUNNING:
                self._running.remove(sequence)
            case SequenceState.SENDING:
                del self._sending[sequence.transfer_id]
        sequence.move(SequenceState.FINISHED)
        if sequence.grammar_state is not None:
            sequence.grammar_state.cancel()

    def _expire(self, plan: StepPlan) -> None:
        now = self._clock()
        for sequence in list(self._waiting):  # what runs is ended by its gateway's abort
            if sequence.deadline_s <= now:
                self.finish(sequence)
                plan.expired.append(sequence)

    def _free_blocks(self, sequence: Sequence) -> None:
        self.launched.free(sequence, sequence.block_table[::-1])
        sequence.block_table = []
        sequence.num_registered_blocks = 0

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _by_urgency(sequence: Sequence) -> tuple[int, float]:
    return sequence.urgency
