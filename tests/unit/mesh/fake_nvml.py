"""Builds a libnvidia-ml.so.1 that describes a made-up host, for nvidia-ml-py to load."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration.loud_skip import skip_loudly

_SOURCE = Path(__file__).with_name("fake_nvml.c")
_GIB = 1 << 30


@dataclass(frozen=True)
class FakeLink:
    """One NVLink of a GPU; ``remote`` is the place of a PCI device, below 0 for one not told."""

    version: int = 6
    kind: str = "SWITCH"
    remote: int = 100
    active: int = 1


@dataclass(frozen=True)
class FakeGpu:
    """One GPU; ``mig`` -1: the card knows no MIG."""

    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = ""
    memory: int = 80 * _GIB
    used: int = 0
    mig: int = 0
    lost: int = 0
    links: Sequence[FakeLink] = field(default_factory=tuple)


def build_fake_nvml(
    folder: Path, gpus: Sequence[FakeGpu], levels: Sequence[Sequence[int]], init: int = 0
) -> Mapping[str, str]:
    """Compile the library into ``folder``; skips the test where there is no C compiler.

    Returns:
        The environment of a process that is to load it.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        skip_loudly("reading NVML", "no C compiler for a made-up driver library")
    rows = [
        f'{{"{gpu.uuid or f"GPU-{place}"}", "{gpu.name}", {gpu.memory}ull, {gpu.used}ull, '
        f"{gpu.mig}, {gpu.lost}, {{{_links(gpu)}}}}}"
        for place, gpu in enumerate(gpus)
    ]
    (folder / "host.h").write_text(
        f"#define INIT {init}\n"
        f"static const struct gpu gpus[] = {{{', '.join(rows)}}};\n"
        f"static const int levels[][{len(gpus)}] = "
        f"{{{', '.join('{' + ', '.join(map(str, row)) + '}' for row in levels)}}};\n"
    )
    library = folder / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", f"-I{folder}",
               "-o", str(library), str(_SOURCE)]  # fmt: skip
    subprocess.run(command, check=True)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


def _links(gpu: FakeGpu) -> str:
    links = [f"{{{x.active}, {x.version}, {x.kind}, {x.remote}}}" for x in gpu.links]
    return ", ".join(links) or "{0, 0, 0, 0}"
