"""Continuous against static batching: one engine, output lengths of a real chat service.

Static: a batch is admitted together, and the next one when its last sequence is done; padded, as
servers did it, every row is computed until then. Continuous: whenever a sequence is done, the next
one takes its place in the very next step, at the same batch size or, at will, in the same memory.
Only the tokens that were asked for count.

The memory of all is that of a static batch, which must reserve every row for the longest request.
Pages hold only what was computed, so that more sequences fit.

    static       | a a a a a a a a | e e e …        continuous   | a a a a a a a a f f …
                 | b b . . . . . . | f f …                       | b b c c c c d d d d d e …
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from benchmarks.local_engine import (
    BLOCK_SIZE,
    add_sequence,
    engine_machine,
    finish_ended,
    make_engine,
)
from benchmarks.table import format_table, num_cores, write_json
from benchmarks.workload import chat_output_lengths, random_prompts
from mesh.config import WEIGHTS

if TYPE_CHECKING:
    from engine.engine import Engine

_SAME_BATCH, _SAME_MEMORY = "continuous, same batch", "continuous, same memory"
_KINDS = ("static, padded", "static", _SAME_BATCH, _SAME_MEMORY)
_HEADINGS = (
    "batching", "output tok/s", "seconds", "steps", "useful tokens a step", "same memory / this",
)  # fmt: skip


def main(argv: SequenceOf[str]) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="pdmesh bench batching", description=__doc__)
    add = parser.add_argument
    add("--requests", type=int, default=500, help="of the trace, at most 1020 (default: 500)")
    add("--scale", type=float, default=0.25, help="of the trace's lengths (default: 0.25)")
    add("--input", type=int, default=16, help="prompt tokens (default: 16)")
    add("--batch", type=int, default=16, help="most sequences in a batch (default: 16)")
    add("--rounds", type=int, default=1, help="runs of each kind, alternately (default: 1)")
    add("--weights", default="int8", choices=WEIGHTS, help="how weights are held")
    add("--model", default="", help="GGUF file or folder (default: the packaged model)")
    add("--threads", type=int, default=num_cores(), help="compute threads (default: all cores)")
    add("--json", default="", metavar="FILE", help="write every round's figures there")
    options = parser.parse_args(argv)
    lengths = chat_output_lengths(options.requests, options.scale)
    print(engine_machine())
    print(
        f"{len(lengths)} requests, {options.input} tokens in, {min(lengths)} to {max(lengths)} "
        f"out (mean {statistics.fmean(lengths):.0f}), batch {options.batch}\n"
    )
    engine = make_engine(
        model=options.model, weights=options.weights, threads=options.threads,
        kv_blocks=options.batch * -(-(options.input + max(lengths)) // BLOCK_SIZE),
    )  # fmt: skip
    runs: dict[str, list[tuple[float, int]]] = {kind: [] for kind in _KINDS}
    for number in range(options.rounds):
        for kind, of_kind in runs.items():
            prompts = random_prompts(len(lengths), options.input, seed=(kind, number))
            size = options.batch if kind.startswith("static") else len(lengths)
            engine.scheduler.max_num_seqs = len(lengths) if kind == _SAME_MEMORY else options.batch
            computed = _padded(lengths, size) if kind == "static, padded" else lengths
            of_kind.append(_run(engine, prompts, computed, admitted_together=size))
            print(
                f"round {number + 1}/{options.rounds}, {kind}: {of_kind[-1][0]:.1f} s", flush=True
            )
    num_tokens = sum(lengths)
    seconds = {kind: statistics.median(s for s, _ in of_kind) for kind, of_kind in runs.items()}
    rows: list[list[object]] = []
    for kind, of_kind in runs.items():
        steps = of_kind[0][1]
        ratio = seconds[kind] / seconds[_SAME_MEMORY]
        rows.append(
            [kind, num_tokens / seconds[kind], seconds[kind], steps, num_tokens / steps, ratio]
        )
    print(f"\n{format_table(_HEADINGS, rows)}")
    if options.json:
        write_json(
            options.json, {"machine": engine_machine(), "options": vars(options), "runs": runs}
        )
    return 0


def _padded(lengths: list[int], batch: int) -> list[int]:
    """Every length raised to the longest of its batch."""
    firsts = [index - index % batch for index in range(len(lengths))]
    return [max(lengths[first : first + batch]) for first in firsts]


def _run(
    engine: Engine, prompts: list[list[int]], lengths: list[int], *, admitted_together: int
) -> tuple[float, int]:
    """Seconds and steps until every request has its tokens."""
    num_steps = 0
    start_s = time.monotonic()
    for first in range(0, len(lengths), admitted_together):
        live = {
            add_sequence(engine, f"{index}", prompts[index], lengths[index])
            for index in range(first, min(first + admitted_together, len(lengths)))
        }
        while live:
            engine.step()
            num_steps += 1
            finish_ended(engine, live)
    return time.monotonic() - start_s, num_steps
