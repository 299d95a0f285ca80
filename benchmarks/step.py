"""Step time of the engine: decode against the memory bandwidth limit, prefill in tokens/s.

    limit = (weight bytes + KV bytes of the batch) / read bandwidth of this machine

The bandwidth is measured here: a sum over a 512 MB buffer by as many threads, best of several.
With ``--shares`` a profile of some decode steps says instead which kernels they consist of.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import msgspec

from benchmarks.local_engine import add_sequence, engine_machine, finish_ended, make_engine
from benchmarks.table import format_table, num_cores, write_json
from benchmarks.workload import random_prompts
from mesh.config import WEIGHTS, Weights

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.sequence import Sequence

_BUFFER_FLOATS = 512 * 1000 * 1000 // 4
_BANDWIDTH_RUNS = 7
_DECODE_HEADINGS = (
    "weights", "batch", "step ms", "tok/s", "limit ms", "limit / step", "step / batch 1",
)  # fmt: skip
_SHARES_HEADINGS = ("weights", "kernel", "ms a step", "% of it", "GB/s", "GFLOP/s")
_LONGEST_PROFILE_S = 600.0
_PREFILL_HEADINGS = ("weights", "prompt", "ms", "tok/s")


def main(argv: SequenceOf[str]) -> int:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(prog="pdmesh bench step", description=__doc__)
    add = parser.add_argument
    add("--weights", default="int8,int4,fp32", help="kinds to measure (default: int8,int4,fp32)")
    add("--batch", default="1,2,4,8,16,32,64", help="sequences a step")
    add("--context", type=int, default=200, help="tokens in each sequence's cache (default: 200)")
    add("--steps", type=int, default=20, help="decode steps timed (default: 20)")
    add("--prompts", default="128,2000", help="prompt lengths of the prefill table")
    add("--prefill-runs", type=int, default=3, help="of which the median is shown (default: 3)")
    add("--model", default="", help="GGUF file or folder (default: the packaged model)")
    add("--threads", type=int, default=num_cores(), help="compute threads (default: all cores)")
    add("--json", default="", metavar="FILE", help="write the tables' rows there")
    add(
        "--shares", type=int, nargs="?", const=16, default=0, metavar="BATCH",
        help="show each kernel's share of a decode step of so many sequences (16) instead",
    )  # fmt: skip
    options = parser.parse_args(argv)
    kinds = options.weights.split(",")
    batches = [int(batch) for batch in options.batch.split(",")]
    prompt_lengths = [int(length) for length in options.prompts.split(",")]
    for kind in kinds:
        if kind not in WEIGHTS:
            parser.error(f"--weights: {kind!r} is not one of {', '.join(WEIGHTS)}")
    print(engine_machine())
    if options.shares:
        return _show_shares(options, kinds)
    bandwidth = 0.0
    decode: list[list[object]] = []
    prefill: list[list[object]] = []
    for kind in kinds:
        engine = make_engine(
            model=options.model, weights=kind, threads=options.threads, max_num_seqs=max(batches)
        )
        bandwidth = bandwidth or _read_bandwidth()
        first_s = 0.0
        for batch in batches:
            step_s = _decode_step_s(engine, batch, options.context, options.steps)
            first_s = first_s or step_s
            limit_s = _bytes_read(engine, batch, options.context + options.steps // 2) / bandwidth
            decode.append([
                kind, batch, step_s * 1000, batch / step_s, limit_s * 1000, limit_s / step_s,
                step_s / first_s,
            ])  # fmt: skip
        for length in prompt_lengths:
            times_s = [_prefill_s(engine, length, run) for run in range(options.prefill_runs)]
            seconds = statistics.median(times_s)
            prefill.append([kind, length, seconds * 1000, length / seconds])
        megabytes = engine.model.num_weight_bytes / 1e6
        print(f"{kind}: {megabytes:.0f} MB of weights, KV as {engine.kv_spec.dtype}", flush=True)
        del engine
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s with {options.threads} threads\n")
    print(f"decode, context {options.context}\n\n{format_table(_DECODE_HEADINGS, decode)}\n")
    print(f"prefill of one prompt\n\n{format_table(_PREFILL_HEADINGS, prefill)}")
    if options.json:
        content = {
            "machine": engine_machine(), "options": vars(options),
            "bandwidth_bytes_per_s": bandwidth,
            "decode": [dict(zip(_DECODE_HEADINGS, row, strict=True)) for row in decode],
            "prefill": [dict(zip(_PREFILL_HEADINGS, row, strict=True)) for row in prefill],
        }  # fmt: skip
        write_json(options.json, content)
    return 0


def _show_shares(options: argparse.Namespace, kinds: SequenceOf[str]) -> int:
    batch, table = options.shares, list[list[object]]()
    for kind in msgspec.convert(kinds, list[Weights]):
        engine = make_engine(
            model=options.model, weights=kind, threads=options.threads, max_num_seqs=batch
        )
        table += [[kind, *row] for row in _shares(engine, batch, options.context, options.steps)]
        del engine
    print(f"\ndecode, batch {batch}, context {options.context}\n")
    print(format_table(_SHARES_HEADINGS, table))
    if options.json:
        rows = [dict(zip(_SHARES_HEADINGS, row, strict=True)) for row in table]
        content = {"machine": engine_machine(), "options": vars(options), "shares": rows}
        write_json(options.json, content)
    return 0


def _shares(
    engine: Engine, batch: int, context: int, num_steps: int
) -> list[tuple[str, float, float, float, float]]:
    """Rows of the table of shares, without the kind of weights."""
    from engine.profiling.report import build_report
    from engine.profiling.session import ProfileData, ProfileSession

    done: list[ProfileData] = []
    live = _begin_decoding(engine, batch, context, num_steps)
    deadline_s = time.monotonic() + _LONGEST_PROFILE_S
    engine.profile = ProfileSession(engine, num_steps, deadline_s, done.append)
    while not done:
        engine.step()
    for sequence in live:
        engine.scheduler.finish(sequence)
    report = build_report(done[0])
    step_ms = 1000 * report["mean_step_s"]
    rows = [
        (
            row["op"], 1000 * row["time_s"] / report["steps"],
            100 * row["time_s"] / report["steps"] / report["mean_step_s"],
            row["bytes_per_s"] / 1e9, row["flops_per_s"] / 1e9,
        )
        for row in report["ops"]
        if row["phase"] == "decode"
    ]  # fmt: skip
    rest_ms = step_ms - sum(row[1] for row in rows)
    unknown = float("nan")
    rows.append(("the rest", rest_ms, 100 * rest_ms / step_ms, unknown, unknown))
    return [*rows, ("a step", step_ms, 100.0, unknown, unknown)]


def _read_bandwidth() -> float:
    """Bytes per second, with the threads that the engine set up."""
    import torch

    buffer = torch.ones(_BUFFER_FLOATS)
    best_s = float("inf")
    for _ in range(_BANDWIDTH_RUNS):
        start_s = time.monotonic()
        buffer.sum()
        best_s = min(best_s, time.monotonic() - start_s)
    return 4 * _BUFFER_FLOATS / best_s


def _bytes_read(engine: Engine, batch: int, context: int) -> float:
    spec = engine.kv_spec
    return engine.model.num_weight_bytes + batch * context * spec.block_bytes / spec.block_size


def _begin_decoding(engine: Engine, batch: int, context: int, num_steps: int) -> set[Sequence]:
    """Sequences that get one token each in the steps that follow; the caller finishes them."""
    prompts = random_prompts(batch, context, seed=("decode", batch))
    # One token with the prompt, then the timed ones; longer ones keep the batch whole meanwhile.
    live = {
        add_sequence(engine, f"{index}", prompt, num_steps + context * batch)
        for index, prompt in enumerate(prompts)
    }
    while any(sequence.num_uncomputed_tokens > 1 for sequence in live):
        engine.step()
    return live


def _decode_step_s(engine: Engine, batch: int, context: int, num_steps: int) -> float:
    """Median time of a step in which each of ``batch`` sequences gets one token."""
    live = _begin_decoding(engine, batch, context, num_steps)
    times_s = []
    for _ in range(num_steps):
        start_s = time.monotonic()
        outcome = engine.step()
        times_s.append(time.monotonic() - start_s)
        assert len(outcome.results) == batch, "the KV pool does not hold the whole batch"
    for sequence in live:
        engine.scheduler.finish(sequence)
    return statistics.median(times_s)


def _prefill_s(engine: Engine, num_tokens: int, run: int) -> float:
    """Time from a prompt to its first token, on an idle engine."""
    prompt = random_prompts(1, num_tokens, seed=("prefill", num_tokens, run))[0]
    start_s = time.monotonic()
    live = {add_sequence(engine, "prompt", prompt, 1)}
    while live:
        engine.step()
        finish_ended(engine, live)
    return time.monotonic() - start_s
