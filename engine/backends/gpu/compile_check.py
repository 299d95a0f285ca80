"""Compiles every kernel variant for GPUs that are not here, and says what each one takes.

    python -m engine.backends.gpu.compile_check [--write docs/gpu.md] [--only NAME] [--jobs N]

Exits with 1 if a variant doesn't compile, spills registers, or needs more shared memory than a
block may have on its target. ``--write`` puts the table between the two markers of that file.

Must run without TRITON_INTERPRET: the interpreter's functions can't be compiled.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from engine.backends.gpu import kernels, tuning
from engine.backends.gpu.variant import Variant

_SHARED_LIMITS = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""By compute capability, times ten: the most shared memory of one block, in bytes."""

_TENSOR_MEMORY_COLUMNS = 512  # of a multiprocessor, from capability 10.0 on

START_MARK = "<!-- compile table: start -->"
END_MARK = "<!-- compile table: end -->"


@dataclass(slots=True, frozen=True)
class Target:
    """A column of the table: any card of a capability, or one that has a table of its own."""

    capability: int
    card: str | None = None

    def __str__(self) -> str:
        return f"sm_{self.capability}" if self.card is None else self.card


@dataclass(slots=True, frozen=True)
class Job:
    """One variant on one target."""

    kernel: str
    """The file's name."""
    variant: str
    target: Target


@dataclass(slots=True, frozen=True)
class Built:
    """What a job gave."""

    job: Job
    registers: int = 0
    """Of one thread."""
    stack_bytes: int = 0
    """Of one thread, in local memory: spilled registers."""
    shared_bytes: int = 0
    """Of one block."""
    tensor_columns: int = 0
    """Of tensor memory, of one block."""
    error: str = ""

    def faults(self) -> list[str]:
        """Why this may not be launched."""
        if self.error:
            return [self.error]
        found = []
        if self.stack_bytes:
            found.append(f"spills {self.stack_bytes} bytes a thread")
        limit = _SHARED_LIMITS[self.job.target.capability]
        if self.shared_bytes > limit:
            found.append(f"needs {self.shared_bytes} of {limit} bytes of shared memory")
        if self.tensor_columns > _TENSOR_MEMORY_COLUMNS:
            found.append(f"needs {self.tensor_columns} columns of tensor memory")
        return found


def kernel_names() -> list[str]:
    """The files in the kernels' folder that have variants."""
    return [name for name, module in kernels.modules().items() if hasattr(module, "variants")]


def targets() -> list[Target]:
    """Every capability, then every card with a table of its own."""
    cards = [Target(tuning.CARD_CAPABILITIES[name], name) for name in tuning.known_cards()]
    return [Target(capability) for capability in _SHARED_LIMITS] + cards


def jobs_of(kernel: str) -> list[Job]:
    """All variants of a kernel's file: for every capability, and where a card's table has others.

    Raises:
        ValueError: Two variants of a target have one name.
    """
    jobs: list[Job] = []
    for target in targets():
        variants = _variants(kernel, target)
        if len({variant.name for variant in variants}) < len(variants):
            raise ValueError(f"variants of {kernel} share a name")
        usual = _variants(kernel, Target(target.capability)) if target.card else []
        jobs.extend(
            Job(kernel, variant.name, target) for variant in variants if variant not in usual
        )
    return jobs


def build(job: Job) -> Built:
    """Compile to machine code and read its resources."""
    (variant,) = [v for v in _variants(job.kernel, job.target) if v.name == job.variant]
    try:
        compiled = _compile(variant, job.target.capability)
    except Exception as error:  # whatever the compiler raises is this job's result
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]  # after the source
        return Built(job, error=f"does not compile: {reason}")
    if re.search(r"^\s*trap;", compiled.asm["ptx"], re.MULTILINE):
        # how the compiler gives up on what its own resource checks would have refused
        return Built(job, error="compiles to a trap")
    registers, stack_bytes = _resource_usage(compiled.asm["cubin"])
    metadata = compiled.metadata
    tensor_columns = getattr(metadata, "tmem_size", None) or 0
    return Built(job, registers, stack_bytes, metadata.shared, tensor_columns)


def build_all(jobs: list[Job], processes: int) -> list[Built]:
    """Build in several processes; results in the order of ``jobs``."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(build, jobs, chunksize=4))


def table(results: Iterable[Built]) -> str:
    """Markdown: a row per variant, a column of ``registers / shared KiB`` per target."""
    rows: dict[tuple[str, str], dict[Target, Built]] = {}
    for built in results:
        rows.setdefault((built.job.kernel, built.job.variant), {})[built.job.target] = built
    columns = targets()
    lines = [
        f"| kernel | variant | {' | '.join(map(str, columns))} |",
        "|---|---|" + "--:|" * len(columns),
    ]
    for (kernel, variant), by_target in rows.items():
        cells = " | ".join(_cell(by_target.get(target)) for target in columns)
        lines.append(f"| {kernel} | {variant} | {cells} |")
    return "\n".join(lines) + "\n"


def listed(page: str) -> list[tuple[str, str]]:
    """(kernel, variant) of the rows of the table on a page.

    Raises:
        ValueError: The page has no markers.
    """
    return rows_of(_between_marks(page)[1])


def rows_of(table: str) -> list[tuple[str, str]]:
    """(kernel, variant) of the rows of a table."""
    rows = re.findall(r"^\| (\w+) \| ([^|]+) \|", table, re.MULTILINE)
    return [(kernel, variant) for kernel, variant in rows if kernel != "kernel"]


def with_table(page: str, new_table: str) -> str:
    """The page with its table replaced.

    Raises:
        ValueError: The page has no markers.
    """
    before, _, after = _between_marks(page)
    return f"{before}{START_MARK}\n{new_table}{END_MARK}{after}"


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Compile every GPU kernel variant.")
    parser.add_argument("--write", type=Path, help="file whose table is replaced")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set: the interpreter's kernels can't be compiled")
    if options.write and options.only:
        parser.error("--write needs all kernels")
    jobs = [job for name in kernel_names() if options.only in name for job in jobs_of(name)]
    results = build_all(jobs, options.jobs)
    text = table(results)
    print(text, end="")
    if options.write:
        page = options.write.read_text()
        options.write.write_text(with_table(page, text))
    faults = [(built.job, fault) for built in results for fault in built.faults()]
    for job, fault in faults:
        print(f"{job.kernel}, {job.variant}, {job.target}: {fault}", file=sys.stderr)
    return 1 if faults else 0


def _variants(kernel: str, target: Target) -> list[Variant]:
    with tuning.compiling_for(target.capability, target.card):
        variants: list[Variant] = kernels.modules()[kernel].variants()
    return variants


def _compile(variant: Variant, capability: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {}
    constexprs = dict(variant.constexprs)
    attributes = {}
    missing = set(variant.fn.arg_names) ^ (set(variant.signature) | set(variant.constexprs))
    if missing:
        raise ValueError(f"arguments do not match the kernel's: {sorted(missing)}")
    for index, name in enumerate(variant.fn.arg_names):
        kind, _, hint = variant.signature.get(name, "constexpr").partition(":")
        if hint == "16":
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif hint == "1":
            kind, constexprs[name] = "constexpr", 1
        elif hint:
            raise ValueError(f"unknown hint {hint} of {name}")
        signature[name] = kind
    source = ASTSource(variant.fn, signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) of one thread of the kernel in ``cubin``."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    # called functions (there should be none) have lines of their own
    usage = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    return max(int(regs) for regs, _ in usage), max(int(stack) for _, stack in usage)


def _cell(built: Built | None) -> str:
    if built is None:
        return ""
    if built.faults():
        return "fails"
    return f"{built.registers} / {built.shared_bytes / 1024:.3g}"


def _between_marks(page: str) -> tuple[str, str, str]:
    before, start, rest = page.partition(START_MARK)
    old, end, after = rest.partition(END_MARK)
    if not (start and end):
        raise ValueError(f"no {START_MARK} … {END_MARK} on the page")
    return before, old, after


if __name__ == "__main__":
    sys.exit(main())
