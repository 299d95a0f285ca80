"""Cost of structured output: a batch's decode step with some of its rows in a JSON schema.

The kinds of batch take turns, each over the same prompts, so that a machine that slows down slows
all of them. The ratio is the median over the rounds of a kind's step time against the free one's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from benchmarks.local_engine import add_sequence, engine_machine, make_engine
from benchmarks.table import format_table, num_cores, write_json
from benchmarks.workload import random_prompts
from mesh.config import WEIGHTS

if TYPE_CHECKING:
    from engine.engine import Engine

# An answer in it never ends by itself.
_GRAMMAR = """start: %json {
    "type": "array", "minItems": 100000,
    "items": {
        "type": "object", "additionalProperties": false,
        "required": ["name", "age", "tags"],
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["new", "old", "used"]}, "maxItems": 3}
        }
    },
    "x-guidance": {"whitespace_pattern": "[ ]?"}
}"""
_HEADINGS = ("batch", "in a schema", "step ms", "tok/s", "step / free")


def main(argv: SequenceOf[str]) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="pdmesh bench grammar", description=__doc__)
    add = parser.add_argument
    add("--batch", type=int, default=16, help="sequences a step (default: 16)")
    add("--constrained", default="0,1,16", help="how many of them follow the schema")
    add("--context", type=int, default=200, help="tokens in each sequence's cache (default: 200)")
    add("--steps", type=int, default=40, help="steps timed in a round (default: 40)")
    add("--rounds", type=int, default=9, help="turns of each kind (default: 9)")
    add("--weights", default="int8", choices=WEIGHTS, help="weights in memory (default: int8)")
    add("--model", default="", help="GGUF file or folder (default: the packaged model)")
    add("--threads", type=int, default=num_cores(), help="compute threads (default: all cores)")
    add("--json", default="", metavar="FILE", help="write the table's rows there")
    options = parser.parse_args(argv)
    kinds = [int(count) for count in options.constrained.split(",")]
    if kinds[0] != 0 or not all(0 <= count <= options.batch for count in kinds):
        parser.error("--constrained: begins with 0, and none is over --batch")
    print(engine_machine())
    engine = make_engine(
        model=options.model, weights=options.weights, threads=options.threads,
        max_num_seqs=options.batch,
    )  # fmt: skip
    times_s: dict[int, list[float]] = {count: [] for count in kinds}
    for run in range(options.rounds):
        for count in kinds if run % 2 else reversed(kinds):
            times_s[count].append(_step_s(engine, options, count, run))
    rows = []
    for count in kinds:
        ratios = [mine / free for mine, free in zip(times_s[count], times_s[0], strict=True)]
        step_s = statistics.median(times_s[count])
        rows.append([
            options.batch, count, step_s * 1000, options.batch / step_s, statistics.median(ratios),
        ])  # fmt: skip
    print(format_table(_HEADINGS, rows))
    if options.json:
        table = [dict(zip(_HEADINGS, row, strict=True)) for row in rows]
        write_json(
            options.json, {"machine": engine_machine(), "options": vars(options), "rows": table}
        )
    return 0


def _step_s(engine: Engine, options: argparse.Namespace, num_constrained: int, run: int) -> float:
    """Median time of a step of a batch of which the first ``num_constrained`` follow the schema."""
    prompts = random_prompts(options.batch, options.context, seed=("grammar", run))
    num_output = options.steps + options.context * options.batch
    live = [
        add_sequence(
            engine, f"{index}", prompt, num_output,
            grammar=_GRAMMAR if index < num_constrained else "",
        )
        for index, prompt in enumerate(prompts)
    ]  # fmt: skip
    while any(sequence.num_uncomputed_tokens > 1 or sequence.awaits_grammar for sequence in live):
        engine.step()
    times_s = []
    for _ in range(options.steps):
        start_s = time.monotonic()
        outcome = engine.step()
        times_s.append(time.monotonic() - start_s)
        assert not outcome.failed
        assert len(outcome.computed) == options.batch, "the KV pool does not hold the whole batch"
    for sequence in live:
        engine.scheduler.finish(sequence)
    engine.scheduler.pool.forget_cached()
    return statistics.median(times_s)
