"""CPU backend: numba kernels, some of them LLVM IR written out.

numba's cache of compiled kernels watches only the file that a kernel stands in, but kernels here
are inlined into each other: the cache's folder is named after all sources, so an upgrade starts
anew. PDMESH_KERNEL_CACHE names a folder for these folders, where the source's is not writable.
Whoever can write there decides what machine code the workers run.
"""

import hashlib
import os
from pathlib import Path

import torch  # noqa: F401 - loads the OpenMP runtime that numba's threading layer then shares

import engine.backends.cpu.level  # noqa: F401 - before numba, which reads what it sets

os.environ.setdefault("NUMBA_THREADING_LAYER", "omp")

from numba.core import config

_FOLDER = Path(__file__).parent
_CACHES = Path(os.environ.get("PDMESH_KERNEL_CACHE") or _FOLDER / "__pycache__")
_existing = _CACHES if _CACHES.exists() else _CACHES.parent
SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(_FOLDER.glob("*.py")))
).hexdigest()[:16]
"""Names this version of the kernels."""
if not config.CACHE_DIR and os.access(_existing, os.W_OK):  # type: ignore[attr-defined]
    config.CACHE_DIR = str(_CACHES / f"kernels-{SOURCES}")  # type: ignore[attr-defined]
CACHE_FOLDER = Path(config.CACHE_DIR) if config.CACHE_DIR else None  # type: ignore[attr-defined]
"""Where compiled kernels are kept, not necessarily there yet; None: wherever numba finds a place,
or nowhere."""
