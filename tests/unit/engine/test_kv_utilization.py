"""How much of a decode worker's pool holds computed tokens under more load than it can take.

Utilisation is the computed tokens of live sequences over the slots of the pool. What is missing to
1: room that the most urgent request waits for (the longest prompt of the trace needs 361 blocks),
the watermark (1 %), the unused end of last blocks (half a block per sequence), and blocks whose KV
is on its way.
"""

from __future__ import annotations

import csv
import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.cache.block_pool import BlockPool
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Sequence
from mesh.messages import SamplingParams, SloClass

BLOCK_SIZE = 16
STEP_S = 0.05
NUM_STEPS = 4000
WARM_UP_STEPS = 1000
NUM_WAITING = 16
"""Of each class, at every moment."""
CLASSES: tuple[SloClass, ...] = ("interactive", "batch")
_TRACE = Path(__file__).parents[3] / "benchmarks" / "data" / "azure_conv_2023.csv"


def lengths() -> Iterator[tuple[int, int]]:
    """(prompt, output) tokens of a chat service's requests, over and over."""
    with _TRACE.open(newline="") as lines:
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    pairs = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows]
    return itertools.cycle(pairs)


class SaturatedWorker:
    """A decode worker whose KV arrives one step after the blocks were granted."""

    def __init__(self, num_blocks: int) -> None:
        self.now_s = 0.0
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(
            self.pool,
            block_size=BLOCK_SIZE,
            max_num_seqs=128,
            max_batched_tokens=512,
            prefix_caching=False,
            clock=lambda: self.now_s,
        )
        self.arriving: list[Sequence] = []
        self.ended: list[float] = []
        self._lengths = lengths()
        self._names = itertools.count()

    def step(self) -> float:
        """One step; returns the utilisation while it is computed."""
        self._arrive()
        for sequence in self.arriving:
            self.scheduler.kv_arrived(sequence)
            self._append(sequence)
        plan = self.scheduler.schedule()
        self.arriving = plan.reserved
        sampled = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        self.scheduler.launch(plan)
        self.scheduler.step_done(plan)
        live = self.scheduler.live_sequences()
        used = sum(sequence.num_computed_tokens for sequence in live)
        for sequence in sampled:
            self._append(sequence)
        self.now_s += STEP_S
        return used / (self.pool.num_blocks * BLOCK_SIZE)

    def waiting(self, slo_class: SloClass) -> list[Sequence]:
        """Not admitted yet."""
        live = self.scheduler.live_sequences()
        return [s for s in live if not s.block_table and s.slo_class == slo_class]

    def _arrive(self) -> None:
        for slo_class in CLASSES:
            for _ in range(NUM_WAITING - len(self.waiting(slo_class))):
                prompt, output = next(self._lengths)
                name = f"r{next(self._names)}"
                sequence = Sequence(
                    request_id=name,
                    transfer_id=name,
                    token_ids=[0] * prompt,
                    num_prompt_tokens=prompt,
                    sampling=SamplingParams(max_tokens=output),
                    deadline_s=float("inf"),
                    arrival_s=self.now_s,
                    slo_class=slo_class,
                )
                self.scheduler.add(sequence, remote_prefill=True)

    def _append(self, sequence: Sequence) -> None:
        sequence.append(0)
        if sequence.finish_reason is not None:
            self.scheduler.finish(sequence)
            self.ended.append(self.now_s - sequence.arrival_s)


@pytest.mark.parametrize("num_blocks", [2912, 5825])
def test_a_saturated_pool_is_nearly_full(num_blocks: int) -> None:
    """The packaged model's pool of 1 GiB, which holds 37 requests of this trace, and of 2 GiB."""
    worker = SaturatedWorker(num_blocks)
    usage = [worker.step() for _ in range(NUM_STEPS)]
    mean = statistics.fmean(usage[WARM_UP_STEPS:])
    assert mean >= 0.96, f"KV utilisation {mean:.4f}"
    worker.pool.check_integrity()


def test_saturation_neither_thrashes_nor_starves() -> None:
    worker = SaturatedWorker(2912)
    for _ in range(NUM_STEPS):
        worker.step()
    assert worker.scheduler.num_preemptions < 0.06 * len(worker.ended)
    ages = [worker.now_s - s.arrival_s for c in CLASSES for s in worker.waiting(c)]
    assert max(ages + worker.ended) < 120.0
