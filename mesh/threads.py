"""OpenMP settings that must be in the environment before torch is loaded."""

from __future__ import annotations

import os

SPIN_COUNT = "2000"
"""Turns (~10 µs) an idle OpenMP thread spins before it sleeps. The default spins for milliseconds,
which on a shared core is time taken from the worker of the other role; sleeping at once halves
the speed of short steps."""


def configure_threads() -> None:
    """Set defaults; what the user exported stays."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    os.environ.setdefault("NUMBA_THREADING_LAYER", "omp")
