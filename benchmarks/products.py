"""Products of one linear layer, GFLOP/s by kind of weights, beside torch's in float32.

All kinds are timed in turns, A B C A B C, and of each the best turn counts: what disturbs the
machine disturbs all of them, and seldom in every turn.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial

import msgspec

from benchmarks.local_engine import engine_machine
from benchmarks.table import format_table, write_json

_KINDS = ("fp32", "int8", "int4")
_TURN_S = 0.05
"""A turn repeats the product for about this long."""
_HEADINGS = ("out x in", "rows", "weights", "µs", "GFLOP/s", "GFLOP/s / torch")


def main(argv: SequenceOf[str]) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="pdmesh bench products", description=__doc__)
    add = parser.add_argument
    add("--weights", default=",".join(_KINDS), help="kinds to measure (default: %(default)s)")
    add("--rows", default="1,16,128", help="tokens in a product (default: 1,16,128)")
    add(
        "--shape", default="1536x576,576x1536,49152x576", metavar="OUTxIN,…",
        help="of the weights (default: the packaged model's gate or up, down and head)",
    )  # fmt: skip
    add("--threads", type=int, default=1, help="compute threads (default: 1)")
    add("--turns", type=int, default=9, help="of which each kind's best counts (default: 9)")
    add("--json", default="", metavar="FILE", help="write the table's rows there")
    options = parser.parse_args(argv)
    kinds = options.weights.split(",")
    for kind in kinds:
        if kind not in _KINDS:
            parser.error(f"--weights: {kind!r} is not one of {', '.join(_KINDS)}")
    try:
        shapes = [_shape(text) for text in options.shape.split(",")]
    except ValueError:
        parser.error("--shape: write OUTxIN, such as 1536x576")
    print(f"{engine_machine()}, {options.threads} threads\n", flush=True)
    table: list[list[object]] = []
    for out_features, in_features in shapes:
        for rows in map(int, options.rows.split(",")):
            products = _products(out_features, in_features, rows, kinds, options.threads)
            best_s = _best_s(products, options.turns)
            flops = 2 * rows * out_features * in_features
            for kind, seconds in best_s.items():
                table.append([
                    f"{out_features}x{in_features}", rows, kind, seconds * 1e6,
                    flops / seconds / 1e9, best_s["torch fp32"] / seconds,
                ])  # fmt: skip
    print(format_table(_HEADINGS, table))
    if options.json:
        content = {
            "machine": engine_machine(), "options": vars(options),
            "rows": [dict(zip(_HEADINGS, row, strict=True)) for row in table],
        }  # fmt: skip
        write_json(options.json, content)
    return 0


def _shape(text: str) -> tuple[int, int]:
    out_features, in_features = text.split("x")
    return int(out_features), int(in_features)


def _products(
    out_features: int, in_features: int, rows: int, kinds: SequenceOf[str], num_threads: int
) -> dict[str, Callable[[], object]]:
    """One product of each kind with equal weights; sets the threads that compute it."""
    import torch

    from engine.backends.cpu.backend import WeightScheme
    from engine.backends.cpu.kernel_calls import begin_prompt, small_backend

    weight = torch.randn(out_features, in_features) * in_features**-0.5
    x = torch.randn(rows, in_features)
    products: dict[str, Callable[[], object]] = {
        "torch fp32": partial(torch.nn.functional.linear, x, weight)
    }
    for kind in msgspec.convert(kinds, list[WeightScheme]):
        backend = small_backend(kind, "fp32", num_threads)
        begin_prompt(backend, 1)
        products[kind] = partial(backend.linear(weight), x)
    return products


def _best_s(products: dict[str, Callable[[], object]], num_turns: int) -> dict[str, float]:
    """Seconds of one product in its best turn."""
    best_s = dict.fromkeys(products, float("inf"))
    repeats: dict[str, int] = {}
    for name, product in products.items():
        product()  # compiles, or loads what is compiled
        repeats[name] = max(1, int(_TURN_S / _seconds(product, 1)))
    for _ in range(num_turns):
        for name, product in products.items():
            best_s[name] = min(best_s[name], _seconds(product, repeats[name]))
    return best_s


def _seconds(product: Callable[[], object], repeats: int) -> float:
    start_s = time.perf_counter()
    for _ in range(repeats):
        product()
    return (time.perf_counter() - start_s) / repeats
