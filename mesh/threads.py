"""How a worker's threads share cores: settings that must be made before torch is loaded."""

from __future__ import annotations

import os
import sys

SPIN_COUNT = "2000"
"""Turns (~10 µs) an idle OpenMP thread spins before it sleeps. The default spins for milliseconds,
which on a shared core is time taken from the worker of the other role; sleeping at once halves
the speed of short steps."""

SWITCH_INTERVAL_S = 0.0002
"""How long the event loop may keep the interpreter while the model thread waits to start a kernel.
Python's own 5 ms are a quarter of a decode step."""


def configure_threads() -> None:
    """Set defaults; what the user exported stays."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    os.environ.setdefault("NUMBA_THREADING_LAYER", "omp")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
