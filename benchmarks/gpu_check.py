"""Confirms the GPU path on one card: every kernel exact, its speed, a whole step, a hand-off.

Started by ``benchmarks/gpu_check.sh``, which sees to the packages. Prints Markdown for
``docs/gpu.md`` and exits with 1 if anything is wrong (slow is not wrong).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PARTS = ("kernels", "engine", "speed", "step", "hand-off")
_LARGE_CARD_BYTES = 64 << 30


def main(argv: Sequence[str]) -> int:
    """Run the parts asked for."""
    options = _parser().parse_args(argv)
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
        from tests.unit.engine.gpu.interpreter_bfloat16 import support_bfloat16

        support_bfloat16()
        return _Check(options).kernels()
    import torch

    if not torch.cuda.is_available():
        print("gpu_check: no CUDA device; --interpret checks the kernels without", file=sys.stderr)
        return 2
    if options.tune:
        from engine.backends.gpu import tune

        return tune.main(["--write", "--only", options.only])
    return _Check(options).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__)
    add = parser.add_argument
    add("--parts", default=",".join(_PARTS), help=f"of {', '.join(_PARTS)} (default: all)")
    add("--only", default="", metavar="PATTERN", help="kernels whose name and inputs match")
    add("--interpret", action="store_true", help="only the kernels' results, without a GPU")
    add("--tune", action="store_true", help="write engine/backends/gpu/tuning/<card>.json")
    add("--weights", default="bf16,int4", help="of the decode step (default: bf16,int4)")
    add("--transport", default="ucx", help="of the hand-off (default: ucx)")
    add("--out", default="", metavar="FILE", help="write the report there, too")
    return parser


class _Check:
    """One run; collects the report."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        self._options = options
        self._device = torch.device("cpu" if options.interpret else "cuda")
        self._report: list[str] = []
        self._failed: list[str] = []

    def run(self) -> int:
        """All parts; a part that raises is reported, and the others go on."""
        from benchmarks.gpu.stopwatch import Stopwatch, measure_floors

        start_s = time.monotonic()
        self._say(_machine())
        watch = Stopwatch(self._device)
        floors = measure_floors(watch, self._device)
        self._say(
            f"Measured here: copying {floors.bytes_per_s / 1e12:.2f} TB/s (read and written), "
            f"bf16 product of 8192 x 8192 {floors.flops_per_s / 1e12:.0f} TFLOP/s."
        )
        parts: dict[str, Any] = {
            "kernels": self.kernels,
            "engine": self._engine,
            "speed": lambda: self._speed(watch, floors),
            "step": lambda: self._step(floors.bytes_per_s),
            "hand-off": self._hand_off,
        }
        for name in self._options.parts.split(","):
            part_s = time.monotonic()
            try:
                parts[name]()
            except Exception as error:  # the report says what else works
                self._say(f"**{name} failed**: {type(error).__name__}: {error}")
                self._failed.append(name)
            print(f"[{name}: {time.monotonic() - part_s:.0f} s]", file=sys.stderr)
        verdict = f"FAILED: {', '.join(self._failed)}" if self._failed else "all exact"
        self._say(f"{verdict}, {time.monotonic() - start_s:.0f} s in all.")
        if self._options.out:
            Path(self._options.out).write_text("\n\n".join(self._report) + "\n")
        return 1 if self._failed else 0

    def kernels(self) -> int:
        """Small inputs of every kernel against float64."""
        from benchmarks.gpu.kernel_tables import ERROR_HEADINGS, all_checks, error_rows

        rows = error_rows(all_checks(self._device, self._options.only))
        self._table("Errors against float64, relative to the largest value", ERROR_HEADINGS, rows)
        self._note_failures("kernels", rows, {"WRONG"})
        return 1 if self._failed or not rows else 0

    def _engine(self) -> None:
        from benchmarks.gpu.engine_check import HEADINGS, measure

        with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
            rows = measure(Path(folder))
        self._table("A small random model through the engine", HEADINGS, rows)
        self._note_failures("engine", rows, {"WRONG"})

    def _speed(self, watch: Any, floors: Any) -> None:
        from benchmarks.gpu.kernel_tables import SPEED_HEADINGS, all_timed, speed_rows

        rows = speed_rows(all_timed(self._device, self._options.only), watch, floors)
        self._table("Speed against the measured copy and product", SPEED_HEADINGS, rows)
        self._note_failures("speed", rows, {"WRONG"})

    def _step(self, bytes_per_s: float) -> None:
        import torch

        from benchmarks.gpu.decode_step import HEADINGS, measure, shape_8b

        memory = torch.cuda.get_device_properties(self._device).total_memory
        is_large = memory >= _LARGE_CARD_BYTES
        points = [(1, 1024), (32, 1024), (32, 8192)] if is_large else [(1, 1024), (16, 1024)]
        config = shape_8b(32 if is_large else 8)
        rows: list[list[object]] = []
        for weights in self._options.weights.split(","):
            rows += measure(weights, points, bytes_per_s, config=config)
            torch.cuda.empty_cache()
        title = f"Decode step of Llama 3 8B's shape, {config.num_layers} layers, random weights"
        self._table(title, HEADINGS, rows)

    def _hand_off(self) -> None:
        from benchmarks.gpu import hand_off

        with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
            model, logs = Path(folder, "model"), Path(folder, "logs")
            logs.mkdir()
            hand_off.write_model(model, hand_off.MODEL)
            flags = [
                "--device=cuda", "--weights=bf16", "--kv-blocks=4096",
                "--max-batched-tokens=2048", f"--transport={self._options.transport}",
            ]  # fmt: skip
            rows = hand_off.measure(model, logs, (512, 4096, 16000), flags)
        title = "1P1D on this card, half a billion parameters, one request at a time"
        self._table(title, hand_off.HEADINGS, rows)
        self._note_failures("hand-off", rows, {"DIFFERS"})

    def _note_failures(
        self, part: str, rows: Sequence[Sequence[object]], verdicts: set[str]
    ) -> None:
        wrong = sorted({str(row[0]) for row in rows if row[-1] in verdicts})
        self._failed += [f"{part} ({name})" for name in wrong]

    def _table(self, title: str, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        from benchmarks.table import format_table

        self._say(f"### {title}\n\n{format_table(headings, rows)}")

    def _say(self, text: str) -> None:
        self._report.append(text)
        print(text, end="\n\n", flush=True)


def _machine() -> str:
    import torch
    import triton

    name = torch.cuda.get_device_name()
    driver = torch.version.cuda
    return f"{name}, torch {torch.__version__} (CUDA {driver}), Triton {triton.__version__}."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
